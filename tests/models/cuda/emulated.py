"""The megakernel on the CPU: its own source compiled with g++ over an emulator of the GPU."""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import math
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path

import torch

from models.cuda.mega_params import Params
from models.cuda.mega_weights import MegaWeights
from models.cuda.megakernel import variant_flags
from models.cuda.tensor_map import MAP_BYTES, Boxes

SOURCES = Path(__file__).parents[3] / "models" / "cuda" / "mega"
EMULATOR = Path(__file__).parent / "emulator"
COMPILER = shutil.which("g++")


class EmulatedLauncher:
    """A `Launcher`; `seed` picks the order in which warps run and copies land."""

    def __init__(self, weights: MegaWeights, flags: tuple[str, ...] = ()) -> None:
        self.seed = 0
        self._library = ctypes.CDLL(str(_build((*variant_flags(weights), *flags))))
        assert self._library.params_size() == ctypes.sizeof(Params)

    def encode(self, boxes: Boxes) -> bytes:
        """See emulator/emulated_device.h."""
        return encode(boxes)

    def launch(self, params: Params, rows: int, grid: int) -> None:
        """Run it to its end."""
        assert self._library.emulate(ctypes.byref(params), rows, grid, self.seed) == 0, "deadlock"


def encode(boxes: Boxes) -> bytes:
    """The emulator's tensor map."""
    words = struct.pack("=5Q10I", boxes.address, *boxes.strides, *boxes.sizes, *boxes.box)
    return words.ljust(MAP_BYTES, b"\0")


def fetch(boxes: Boxes, unit: int, block: int) -> torch.Tensor:
    """[elements] bfloat16: one box, fetched in Python, not swizzled."""
    element = 2
    strides = (element, *boxes.strides)
    first = (0, 0, 0, unit, block)
    found = torch.zeros(math.prod(boxes.box), dtype=torch.bfloat16)
    for place, steps in enumerate(itertools.product(*map(range, reversed(boxes.box)))):
        at = [a + b for a, b in zip(first, reversed(steps), strict=True)]
        if all(one < size for one, size in zip(at, boxes.sizes, strict=True)):
            address = boxes.address + sum(one * stride for one, stride in zip(at, strides, strict=True))
            found.view(torch.int16)[place] = ctypes.c_int16.from_address(address).value
    return found


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
