"""The command line of `bench.step`."""

from __future__ import annotations

import argparse
from pathlib import Path

from bench.command_line import whole_numbers
from bench.step_heads import HEADS
from bench.step_shapes import SHAPES
from bench.step_size import step_sizes
from models.weights import DTYPES

SECTIONS = ("decode", "extend", "prefill", "generate", "profile")


def parser(description: str) -> argparse.ArgumentParser:
    """Its command line; the first line of the description is shown."""
    found = argparse.ArgumentParser(prog="bench.step", description=description.partition("\n")[0])
    model = found.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", type=Path, metavar="DIRECTORY", help="a checkpoint")
    model.add_argument("--shape", choices=SHAPES, help="random weights of a published shape")
    found.add_argument("--layers", type=int, metavar="N", help="cut the shape to N layers, for a smoke test")
    found.add_argument("--device", default="cuda", help="where the model runs (%(default)s)")
    found.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16", help="of weights and KV (%(default)s)")
    found.add_argument("--threads", type=int, default=1, metavar="N", help="CPU threads (%(default)s)")
    found.add_argument("--depth", type=int, default=2, metavar="N", help="steps in flight (%(default)s)")
    found.add_argument("--graphs", action=argparse.BooleanOptionalAction, default=True, help="CUDA graphs (--graphs)")
    found.add_argument(
        "--megakernel",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="one kernel a step, where it can be (--megakernel)",
    )
    found.add_argument(
        "--kernel-percent",
        type=_percent,
        default=100,
        metavar="N",
        help="of the multiprocessors, for the megakernel (%(default)s)",
    )
    found.add_argument("--head", choices=HEADS, default="none", help="routing algorithm on every row (%(default)s)")
    found.add_argument("--temperature", type=float, default=0.0, metavar="T", help="of sampling; 0: greedy (0)")
    found.add_argument(
        "--sections", type=_sections, default=SECTIONS, metavar="LIST", help=f"what is measured ({','.join(SECTIONS)})"
    )
    found.add_argument("--steps", type=int, default=200, metavar="N", help="most timed steps of a case (%(default)s)")
    found.add_argument("--seconds", type=float, default=1.0, metavar="S", help="time of a case, roughly (%(default)s)")
    found.add_argument("--kv-tokens", type=int, default=0, metavar="N", help="KV pool (what the cases need)")
    for flag, default, meaning in (
        ("batches", "1,2,4,8,16,32,64,128,256", "rows of decode steps"),
        ("contexts", "128,2048,8192", "tokens before them"),
        ("extend-batches", "1,2,4,8,16,32,64", "requests of extend steps"),
        ("extend-tokens", "1,2,4,8,16", "new tokens of each of them"),
        ("prefill", "128,512,2048,8192", "tokens of prompts"),
        ("generate-batches", "1,4,8,16,32,64", "requests of whole answers"),
    ):
        found.add_argument(
            f"--{flag}", type=whole_numbers, default=default, metavar="LIST", help=f"{meaning} (%(default)s)"
        )
    found.add_argument(
        "--extend-context",
        type=int,
        default=1024,
        metavar="N",
        help="tokens before extend and profiled steps (%(default)s)",
    )
    found.add_argument(
        "--prompt", type=int, default=100, metavar="N", help="tokens of a prompt of generate (%(default)s)"
    )
    found.add_argument("--output", type=int, default=256, metavar="N", help="tokens of its answer (%(default)s)")
    found.add_argument(
        "--profile-steps",
        type=step_sizes,
        default="8x1",
        metavar="LIST",
        help="REQUESTSxROWS of the steps whose kernels are listed (%(default)s)",
    )
    found.add_argument("--vllm", type=Path, metavar="FOLDER", help="the peer's scripts, see bench/step_peer.py")
    found.add_argument("--json", type=Path, metavar="FILE", help="write everything here, after each section")
    found.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables here")
    return found


def _percent(text: str) -> int:
    if not (text.isdecimal() and 1 <= int(text) <= 100):
        raise argparse.ArgumentTypeError(f"expected a number from 1 to 100, got {text!r}")
    return int(text)


def _sections(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in SECTIONS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(SECTIONS)}")
    return names
