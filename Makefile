# make setup | demo | test | test-long | lint | bench | clean
#
# PYTHON       interpreter for the virtual environment (3.11 or newer)
# VENV         where the virtual environment lives
# TORCH_INDEX  package index to take torch from; empty: pip's own. On a machine without a GPU, an index of CPU builds saves
#              gigabytes: make setup TORCH_INDEX=URL
PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=

comma := ,
BIN := $(VENV)/bin
STAMP := $(VENV)/.trouterd-setup
# With an NVIDIA driver: any torch that fits, with CUDA, and what the GPU engine needs. Without: the version that CI uses.
NVIDIA := $(wildcard /proc/driver/nvidia/version)
CONSTRAINTS := $(if $(NVIDIA),,-c constraints-cpu.txt)
EXTRAS := $(if $(NVIDIA),dev$(comma)cuda,dev)

.PHONY: setup demo test test-long lint bench clean

setup: $(STAMP)
	@$(BIN)/python -c 'import torch; print("torch", torch.__version__, "for CUDA" if torch.version.cuda else "for CPU")'
	$(if $(NVIDIA),@$(BIN)/python -c 'import shutil; print("nvcc:", shutil.which("nvcc") or "not on the PATH; kernels that are compiled at the first start need it (docs/operations.md)")')
	@$(BIN)/python -c 'import importlib.util as u; print("ring core:", "C" if u.find_spec("ipc._ring") else "pure Python (no C compiler found)")'

# The stamp is written last, so that an interrupted setup is taken up again.
$(STAMP): pyproject.toml setup.py constraints-cpu.txt $(wildcard ipc/*.c ipc/*.h)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "trouterd needs Python 3.11 or newer: make setup PYTHON=...")'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(if $(TORCH_INDEX),$(BIN)/python -m pip install $(CONSTRAINTS) --index-url $(TORCH_INDEX) 'torch>=2.11')
	$(BIN)/python -m pip install $(CONSTRAINTS) -e '.[$(EXTRAS)]'
	@touch $@

demo: setup
	$(BIN)/trouterd demo

test: $(STAMP)
	$(BIN)/python -m pytest -n auto --maxprocesses 4

test-long: $(STAMP)
	$(BIN)/python -m pytest -m slow --timeout 1800

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/python -m bench.overhead

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis ipc/_ring*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
