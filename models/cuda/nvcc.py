"""CUDA C++ of this package, compiled on first use with the machine's nvcc and kept."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from models.config import ModelError

_FLAGS = ("-std=c++17", "-O3", "-Xcompiler", "-fPIC", "-gencode=arch=compute_90a,code=sm_90a")


def find_nvcc() -> Path | None:
    """The CUDA compiler: of CUDA_HOME, on the PATH, at its usual place, or from a pip package."""
    for candidate in _candidates():
        if candidate.is_file():
            return candidate
    return None


def load_library(sources: Path, units: Sequence[tuple[str, ...]], entry: str) -> ctypes.CDLL:
    """Compile `entry` once for each of `units` (lists of flags), in parallel, link the results and load them.

    Args:
        sources: directory of `entry` and everything that it includes.
        units: flags of each translation unit.
        entry: file name.

    Raises:
        ModelError: there is no nvcc, or it failed.
    """
    target = _cache() / f"{_digest(sources, units)}.so"
    if not target.exists():
        nvcc = find_nvcc()
        if nvcc is None:
            raise ModelError("the megakernel needs nvcc to be compiled: install the CUDA toolkit or set CUDA_HOME")
        _compile(nvcc, sources / entry, units, target)
    return ctypes.CDLL(str(target))


def _candidates() -> Iterator[Path]:
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            yield Path(os.environ[variable]) / "bin" / "nvcc"
    found = shutil.which("nvcc")
    if found:
        yield Path(found)
    yield Path("/usr/local/cuda/bin/nvcc")
    packages = importlib.util.find_spec("nvidia")
    for place in packages.submodule_search_locations or () if packages else ():
        yield from sorted(Path(place).glob("cu*/bin/nvcc"))


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "trouterd" / "kernels"


def _digest(sources: Path, units: Sequence[tuple[str, ...]]) -> str:
    digest = hashlib.sha256(repr((_FLAGS, tuple(units))).encode())
    for path in sorted(sources.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:32]


def _compile(nvcc: Path, source: Path, units: Sequence[tuple[str, ...]], target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        objects = [str(Path(folder) / f"{index}.o") for index in range(len(units))]
        commands = [
            [str(nvcc), *_FLAGS, *flags, "-c", "-o", path, str(source)]
            for flags, path in zip(units, objects, strict=True)
        ]
        processes = [
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # noqa: S603
            for command in commands
        ]
        outputs = [process.communicate()[0] for process in processes]
        for process, output in zip(processes, outputs, strict=True):
            if process.returncode:
                raise ModelError(f"{nvcc} failed on {source}: {output[-2000:]}")
        linked = Path(folder) / "linked.so"
        link = [str(nvcc), "-shared", "-o", str(linked), *objects]
        result = subprocess.run(link, capture_output=True, text=True, check=False)  # noqa: S603
        if result.returncode:
            raise ModelError(f"{nvcc} failed to link {target}: {result.stderr[-2000:]}")
        linked.replace(target)
