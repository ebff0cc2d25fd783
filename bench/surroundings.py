"""Where a benchmark ran: hardware, versions and commit, for its result file."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from contextlib import suppress
from pathlib import Path

import torch

_PACKAGES = ("torch", "triton", "flashinfer-python", "numpy")


def surroundings(device: torch.device) -> dict[str, object]:
    """Fields `hardware`, `versions` and `commit` of a result."""
    return {"hardware": _hardware(device), "versions": _versions(), "commit": _commit()}


def _hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
    return f"{os.cpu_count()} cores of {platform.machine()}"


def _versions() -> dict[str, str]:
    versions = {"Python": platform.python_version()}
    for package in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def _commit() -> str:
    """The commit of this folder, with a + where files differ from it."""
    home = Path(__file__).parent
    try:
        name = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=home, capture_output=True, text=True)
        changes = subprocess.run(["git", "status", "--porcelain", "-uno"], cwd=home, capture_output=True, text=True)
    except OSError:
        return "an unknown commit"
    if name.returncode:
        return "an unknown commit"
    return name.stdout.strip() + ("+" if changes.stdout else "")
