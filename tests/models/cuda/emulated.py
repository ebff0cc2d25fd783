"""The megakernel on the CPU: its own source compiled with g++ over an emulator of the GPU."""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import math
import os
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch

from models.cuda.mega_params import Params
from models.cuda.mega_weights import MegaWeights
from models.cuda.megakernel import MAX_ROWS, variant_flags
from models.cuda.tensor_map import MAP_BYTES, Boxes

SOURCES = Path(__file__).parents[3] / "models" / "cuda" / "mega"
EMULATOR = Path(__file__).parent / "emulator"
COMPILER = shutil.which("g++")


class Task(NamedTuple):
    """A task of attention: mega/schedule.cuh, field by field; `rows` is its `count`."""

    first: int
    rows: int
    start: int
    slot: int
    head: int
    block: int
    queries: int
    tall: int
    tile: int
    old_tiles: int
    new_tiles: int
    part: int
    parts: int
    ticket: int


class EmulatedLauncher:
    """A `Launcher`; `seed` picks the order in which warps run and copies land."""

    def __init__(self, weights: MegaWeights, flags: tuple[str, ...] = ()) -> None:
        self.seed = 0
        self._library = ctypes.CDLL(str(_build((*variant_flags(weights), *flags))))
        assert self._library.params_size() == ctypes.sizeof(Params)
        assert self._library.task_size() == ctypes.sizeof(ctypes.c_int) * len(Task._fields)

    def encode(self, boxes: Boxes) -> bytes:
        """See emulator/emulated_device.h."""
        return encode(boxes)

    def launch(self, params: Params, rows: int, grid: int) -> None:
        """Run it to its end."""
        assert self._library.emulate(ctypes.byref(params), rows, grid, self.seed) == 0, "deadlock"

    def schedule(self, params: Params, grid: int) -> list[Task]:
        """Attention's tasks, in their order; of `params` only what they depend on need be set."""
        fields = len(Task._fields)
        room = max(params.split_tasks, MAX_ROWS * params.kv_heads)
        words = (ctypes.c_int * (room * fields))()
        count = self._library.emulate_schedule(ctypes.byref(params), grid, words, room)
        assert 0 <= count <= room, "deadlock" if count == -1 else f"{count} tasks"
        return [Task(*words[at : at + fields]) for at in range(0, count * fields, fields)]


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
        part = target.with_suffix(f".{os.getpid()}")  # other processes may be at it too
        command = [COMPILER, "-std=c++17", "-O1", "-Wall", "-Werror", "-Wno-unknown-pragmas", "-fno-strict-aliasing"]
        command += ["-shared", "-fPIC", "-DMEGA_EMULATED", f"-I{EMULATOR}", f"-I{SOURCES}", *flags]
        subprocess.run([*command, "-o", str(part), str(EMULATOR / "emulator.cpp")], check=True)
        part.replace(target)
    return target
