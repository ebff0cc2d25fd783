"""Time of one layer's attention by the way in which it is cut into tasks, for steps of any size.

    python -m bench.attention --shape Qwen3-32B --steps 64x1,64x3,16x10 --context 1024 --mixed

Steps are REQUESTSxROWS; --mixed spreads contexts and rows as requests of all ages have them. A cut is
QUERY_ROWSxKEYSxWARPSxSTAGES: query heads of a KV head times token rows that share a program, keys that it handles at a time,
and how the kernel is compiled; each is tried with every number of tasks per multiprocessor (--waves), and with keys that all
rows see handled with masks and without. The first line is the cut in use (`models.cuda.tiles`). Launches go through as many
copies of K and V as exceed the device's cache; floor is their bytes divided by the speed of a large copy.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from bench.attention_load import AttentionLoad
from bench.attention_rig import PAGE, AttentionRig, CutError
from bench.command_line import run_command, usage_fault, whole_number, whole_numbers
from bench.step_shapes import SHAPES, write_shape
from bench.step_size import step_sizes
from bench.surroundings import surroundings
from models.config import ModelConfig
from models.cuda.tiles import TileShape


@dataclass(frozen=True, slots=True)
class Cut:
    """What a command line says of a cut."""

    query_rows: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Found:
    """One cut of one step's attention."""

    step: str
    rows: int
    """Of all requests."""
    keys: int
    """Likewise."""
    tiles: TileShape
    in_use: bool
    floor_us: float
    us: float
    """None of the kernels that list tasks is in it."""


def cuts(text: str) -> tuple[Cut, ...]:
    """An option that is a list of QUERY_ROWSxKEYSxWARPSxSTAGES."""
    found = []
    for part in text.split(","):
        numbers = part.split("x")
        if len(numbers) != len(Cut.__slots__) or not all(number.isdecimal() and int(number) for number in numbers):
            raise argparse.ArgumentTypeError(f"expected QUERY_ROWSxKEYSxWARPSxSTAGES with commas between, got {text!r}")
        found.append(Cut(*map(int, numbers)))
        if any(value & (value - 1) for value in (found[-1].query_rows, found[-1].keys, found[-1].warps)):
            raise argparse.ArgumentTypeError(f"query rows, keys and warps are powers of two, not {part!r}")
    return tuple(found)


def candidates(rig: AttentionRig, options: argparse.Namespace) -> Iterator[TileShape]:
    """All cuts to try."""
    for cut, waves, whole in itertools.product(options.cuts, options.waves, (False, True)):
        yield TileShape(
            query_rows=cut.query_rows,
            keys=cut.keys,
            least_keys=max(options.least_keys, cut.keys),
            tasks=-(-waves * rig.processors // rig.shape.kv_heads),
            whole_blocks=whole,
            warps=cut.warps,
            stages=cut.stages,
        )


def measure(rig: AttentionRig, options: argparse.Namespace, device: torch.device) -> Iterator[Found]:
    """Every step with every cut; those that the device cannot run are named on standard error."""
    for size in options.steps:
        load = AttentionLoad.of(size, options.context, mixed=options.mixed, page_size=PAGE, device=device)
        used, floor = rig.in_use(len(load.positions), len(load.page_table)), rig.floor_us(load)
        facts = str(size), len(load.positions), load.keys
        yield Found(*facts, used, True, floor, rig.time_us(load, used))
        for tiles in candidates(rig, options):
            if tiles == used:
                continue
            try:
                yield Found(*facts, tiles, False, floor, rig.time_us(load, tiles))
            except CutError as error:
                print(f"left out: {size}, {_words(tiles)}: {error}", file=sys.stderr)


def table(found: Sequence[Found], rig: AttentionRig) -> str:
    """In Markdown, the best of each step in bold."""
    lines = [
        "| step | rows | keys | cut | tasks per multiprocessor | masks | us | floor, us |",
        "|---|---:|---:|---|---:|---|---:|---:|",
    ]
    best = {step: min(one.us for one in found if one.step == step) for step in {one.step for one in found}}
    for one in found:
        time = f"{one.us:.1f}"
        cells = (
            one.step,
            str(one.rows),
            str(one.keys),
            _words(one.tiles) + (" (in use)" if one.in_use else ""),
            f"{one.tiles.tasks * rig.shape.kv_heads / rig.processors:.0f}",
            "where needed" if one.tiles.whole_blocks else "always",
            f"**{time}**" if one.us == best[one.step] else time,
            f"{one.floor_us:.1f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _words(tiles: TileShape) -> str:
    return f"{tiles.query_rows}x{tiles.keys}x{tiles.warps}x{tiles.stages}"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    options = _parser().parse_args(arguments)
    device = torch.device(options.device)
    if device.type != "cuda" or not torch.cuda.is_available():
        return usage_fault("bench.attention", f"--device {options.device}: attention is cut on CUDA devices only")
    with tempfile.TemporaryDirectory() as folder:
        rig = AttentionRig(ModelConfig.load(write_shape(options.shape, Path(folder))), device)
    facts: dict[str, Any] = {
        **surroundings(device),
        "command": shlex.join(["python", "-m", "bench.attention", *arguments]),
    }
    found = []
    for one in measure(rig, options, device):
        print(f"{one.step} {_words(one.tiles)} {one.tiles.tasks}: {one.us:.1f} us", flush=True)
        found.append(one)
        if options.json:
            options.json.write_text(json.dumps(facts | {"found": [asdict(one) for one in found]}, indent=1))
    print("\n" + table(found, rig))
    return 0


def _parser() -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="bench.attention", description=__doc__, formatter_class=formatter)
    parser.add_argument("--shape", choices=SHAPES, required=True, help="whose heads")
    parser.add_argument("--device", default="cuda:0", help="which GPU (%(default)s)")
    parser.add_argument(
        "--steps",
        type=step_sizes,
        default="16x1,64x1,16x3,64x3,16x10",
        metavar="LIST",
        help="REQUESTSxROWS (%(default)s)",
    )
    parser.add_argument(
        "--context", type=whole_number, default=1024, metavar="TOKENS", help="before the rows of a step (%(default)s)"
    )
    parser.add_argument("--mixed", action="store_true", help="contexts and rows of these means, spread as in a daemon")
    parser.add_argument(
        "--cuts",
        type=cuts,
        default="16x64x4x5,16x128x4x5,32x64x4x5,32x128x4x5,64x64x4x3,64x64x4x5,128x64x8x3,128x64x8x5",
        metavar="LIST",
        help="QUERY_ROWSxKEYSxWARPSxSTAGES (%(default)s)",
    )
    parser.add_argument(
        "--waves", type=whole_numbers, default="2", metavar="LIST", help="tasks per multiprocessor (%(default)s)"
    )
    parser.add_argument(
        "--least-keys",
        type=whole_number,
        default=128,
        metavar="N",
        help="of a task, where there are as many (%(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here, after each cut")
    return parser


if __name__ == "__main__":
    run_command("bench.attention", main)
