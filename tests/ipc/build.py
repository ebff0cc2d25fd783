"""Compiles variants of the C core for tests."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCES = HERE.parent.parent / "ipc"


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="ring-build-")


@functools.cache
def compile_c(source: str, *options: str) -> Path:
    """The program or library built from `source` with these options; skips the test where that cannot be done."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    target = Path(_folder().name) / f"{Path(source).stem}{len(list(Path(_folder().name).iterdir()))}"
    command = [compiler, "-O2", "-Wall", "-Wextra", "-Wno-missing-field-initializers", "-pthread"]
    command += [*options, f"-I{SOURCES}", source, "-o", str(target)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode and "-fsanitize" in " ".join(options) and "cannot find" in result.stderr:
        pytest.skip(f"the sanitizer runtime is missing: {result.stderr.splitlines()[-1]}")
    assert result.returncode == 0, result.stderr
    return target


def driver(*options: str) -> Path:
    """The threaded driver of the C core."""
    return compile_c(str(HERE / "driver.c"), *options)


def extension(*options: str) -> Path:
    """The extension module ipc._ring, built apart from the installed one."""
    include = sysconfig.get_path("include")
    if not (Path(include) / "Python.h").exists():
        pytest.skip(f"Python.h is missing in {include}")
    return compile_c(str(SOURCES / "_ring.c"), "-shared", "-fPIC", f"-I{include}", *options)


def run_driver(program: Path, *args: object, timeout: float = 55) -> dict[str, int]:
    """Runs the driver and returns its counts."""
    command = [str(program), *map(str, args)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout)
    assert result.returncode == 0, f"{command}: {result.returncode}\n{result.stdout}\n{result.stderr[:4000]}"
    return {key: int(value) for key, value in (item.split("=") for item in result.stdout.split())}
