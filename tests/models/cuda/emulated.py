"""The megakernel on the CPU: its own source compiled with g++ over an emulator of the GPU."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
import tempfile
from pathlib import Path

from models.cuda.mega_params import Params
from models.cuda.megakernel import variant_flags
from models.cuda.packed_weights import PackedWeights

SOURCES = Path(__file__).parents[3] / "models" / "cuda" / "mega"
EMULATOR = Path(__file__).parent / "emulator"
COMPILER = shutil.which("g++")


class EmulatedLauncher:
    """A `Launcher`; `seed` picks the order in which warps run and copies land."""

    def __init__(self, weights: PackedWeights, flags: tuple[str, ...] = ()) -> None:
        self.seed = 0
        self._library = ctypes.CDLL(str(_build((*variant_flags(weights), *flags))))
        assert self._library.params_size() == ctypes.sizeof(Params)

    def launch(self, params: Params, rows: int, grid: int) -> None:
        """Run it to its end."""
        assert self._library.emulate(ctypes.byref(params), rows, grid, self.seed) == 0, "deadlock"


def _build(flags: tuple[str, ...]) -> Path:
    assert COMPILER is not None
    digest = hashlib.sha256(repr(flags).encode())
    for folder in (SOURCES, EMULATOR):
        for path in sorted(folder.iterdir()):
            digest.update(path.read_bytes())
    target = Path(tempfile.gettempdir()) / "trouterd-emulator" / f"{digest.hexdigest()[:32]}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_suffix(".part")
        command = [COMPILER, "-std=c++17", "-O1", "-Wall", "-Werror", "-Wno-unknown-pragmas", "-fno-strict-aliasing"]
        command += ["-shared", "-fPIC", "-DMEGA_EMULATED", f"-I{EMULATOR}", f"-I{SOURCES}", *flags]
        subprocess.run([*command, "-o", str(part), str(EMULATOR / "emulator.cpp")], check=True)
        part.replace(target)
    return target
