"""One of two models that `bench.beside` runs on one device: a process that is told what to run, and until when.

Each line of its input is a JSON object with `requests`, `rows` of each, and `begin` and `end` on the host's monotonic clock,
which all processes share; the answer is a line with the steps that ended in between and their median time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from bench.command_line import run_command
from bench.step_heads import HEADS, make_head
from bench.step_model import Options, open_runner
from bench.step_rig import Rig, TooLargeError
from bench.step_shapes import SHAPES, write_shape
from models.config import ModelError
from models.weights import DTYPES
from trouterd.worker.engine import use_device

_MARGIN = 16
"""Tokens of context and of KV beside those that are asked for: whole pages."""


def main() -> int:
    """Serve lines until they end."""
    options = _parser().parse_args()
    torch.set_num_threads(1)
    try:
        # What loading has to say is no answer.
        with contextlib.redirect_stdout(sys.stderr):
            rig = _open(options)
    except (ModelError, torch.OutOfMemoryError) as error:
        print(json.dumps({"error": f"{options.source}: {error}"}), flush=True)
        return 1
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(_answer(rig, options.context, json.loads(line))), flush=True)
    return 0


def _open(options: argparse.Namespace) -> Rig:
    """The model with its graphs."""
    use_device(torch.device(options.device))
    longest = options.context + options.rows + _MARGIN
    with tempfile.TemporaryDirectory() as folder:
        shape = options.source in SHAPES
        runner = open_runner(
            Options(
                directory=write_shape(options.source, Path(folder)) if shape else Path(options.source),
                device=torch.device(options.device),
                dtype=options.dtype,
                dummy=shape,
                max_slots=options.requests,
                context_length=longest,
                kv_tokens=options.requests * (longest + _MARGIN),
                depth=2,
                megakernel=options.kernel_percent > 0,
                kernel_share=options.kernel_percent / 100,
            )
        )
    head = make_head(options.head, runner, torch.device(options.device))
    if not all(runner.set_routes([head.route] if head else [])):
        raise ModelError(f"--head {options.head}: cannot be decided on {options.device}")
    runner.capture()
    if head is None:
        return Rig(runner, max_slots=options.requests)
    return Rig(runner, max_slots=options.requests, route=0, params=head.params)


def _answer(rig: Rig, context: int, asked: dict[str, Any]) -> dict[str, Any]:
    try:
        times = rig.during(asked["requests"], asked["rows"], context, asked["begin"], asked["end"])
    except TooLargeError as error:
        return {"error": str(error)}
    return {"steps": len(times), "ms": 1e3 * statistics.median(times) if times else None}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.beside_side", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--source", required=True, help="a directory, or a published shape")
    parser.add_argument("--device", required=True, help="the GPU")
    parser.add_argument("--dtype", choices=tuple(DTYPES), required=True, help="of weights and KV")
    parser.add_argument("--requests", type=int, required=True, help="most of a step")
    parser.add_argument("--rows", type=int, required=True, help="most of a request")
    parser.add_argument("--context", type=int, required=True, help="tokens before the rows of a step")
    parser.add_argument("--head", choices=HEADS, default="none", help="routing algorithm on every row (%(default)s)")
    parser.add_argument("--kernel-percent", type=int, default=0, help="of the multiprocessors; 0: no persistent kernel")
    return parser


if __name__ == "__main__":
    run_command("bench.beside_side", main)
