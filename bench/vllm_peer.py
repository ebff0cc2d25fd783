"""Std. Serving on vLLM, on the same card in the same run: one engine per model, one token per call, an asyncio dispatcher.

    python -m bench.vllm_peer FOLDER [--small Qwen3-0.6B --large Qwen3-32B] [--streams 1,4,16] [--p 0.35,0.1] [--tokens 64]
                              [--limit SECONDS] [--json FILE]

FOLDER is one of `bench.peer_folder` with the script
    std_serving.py --small SIZE --large SIZE --conc LIST --p LIST --tokens N
which serves random-weights Qwen3 of these sizes, prefix caching on, to closed loops of N requests of so many tokens. For each N and
p a token of the small engine is dropped with probability p and the large one is called for it; then the large engine alone writes
the same. It prints one JSON object a line. Those with a "conc" carry "tok_s" and, where they have a "p", "gap_ms_p50" and
"gap_ms_p99"; other lines and other objects are shown only. Here it runs under MPS, as models of one card do in a trouterd.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from bench.command_line import run_command, whole_numbers
from bench.mps import sharing
from bench.peer_folder import PeerError, PeerScript, installed
from bench.step_shapes import SHAPES
from bench.surroundings import surroundings
from trouterd.config import Config, Model

SCRIPT = "std_serving.py"
LIMIT = 540.0
"""Seconds; two engines take 150 to load."""


@dataclass(frozen=True, slots=True)
class PeerCase:
    """One closed loop."""

    system: str
    """`vllm std serving`, or `vllm large alone` on the same engines."""
    streams: int
    p: float | None
    tokens_per_second: float
    gap_p50_ms: float | None
    gap_p99_ms: float | None


def run_std_serving(
    folder: Path,
    *,
    small: str,
    large: str,
    streams: Sequence[int],
    shares: Sequence[float],
    tokens: int,
    limit: float = LIMIT,
) -> list[PeerCase]:
    """Install, load, measure; takes minutes, prints what the script prints.

    Args:
        folder: with the script.
        small: a published shape of `bench.step_shapes`, as `large`.
        large: both are on the first GPU.
        streams: requests in flight.
        shares: of the small model's tokens that the large one writes.
        tokens: of one answer.
        limit: seconds; what has been printed by then counts.

    Raises:
        PeerError: no such script, a shape that it does not know, it failed, or nothing was measured in time.
    """
    for shape in (small, large):
        if shape not in SHAPES:
            raise PeerError(f"--vllm: the peer runs published shapes only, not {shape}: {', '.join(SHAPES)}")
    arguments = [
        f"--small={_size(small)}",
        f"--large={_size(large)}",
        f"--conc={','.join(map(str, streams))}",
        f"--p={','.join(map(str, shares))}",
        f"--tokens={tokens}",
    ]
    both = {name: Model(path="", device="cuda:0") for name in ("small", "large")}
    with installed(folder, SCRIPT) as script, sharing(Config(models=both), script.scratch) as variables:
        return list(_cases(script, arguments, variables["small"], limit))


def _size(shape: str) -> str:
    return shape.removeprefix("Qwen3-")


def _cases(
    script: PeerScript, arguments: Sequence[str], variables: Mapping[str, str], limit: float
) -> Iterator[PeerCase]:
    """What it prints, as it comes."""
    environment = script.environment() | dict(variables)
    found = 0
    # A session of its own, since its engines are processes too.
    with subprocess.Popen(
        script.command(arguments), env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        late = threading.Event()

        def stop() -> None:
            late.set()
            with contextlib.suppress(ProcessLookupError):  # it has ended this moment
                os.killpg(process.pid, signal.SIGKILL)

        alarm = threading.Timer(limit, stop)
        alarm.start()
        try:
            for line in process.stdout or ():
                print(line, end="", flush=True)
                if (case := _case(line)) is not None:
                    found += 1
                    yield case
            code = process.wait()
        finally:
            alarm.cancel()
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    if code and not late.is_set():
        raise script.fault(code)
    if not found:
        raise PeerError(f"--vllm: {script.path} measured nothing{f' within {limit:g} s' if late.is_set() else ''}")


def _case(line: str) -> PeerCase | None:
    if not line.startswith("{"):
        return None
    try:
        record: dict[str, Any] = json.loads(line)
        if "conc" not in record:
            return None
        share = record.get("p")
        return PeerCase(
            system="vllm large alone" if share is None else "vllm std serving",
            streams=record["conc"],
            p=share,
            tokens_per_second=record["tok_s"],
            gap_p50_ms=record.get("gap_ms_p50"),
            gap_p99_ms=record.get("gap_ms_p99"),
        )
    except (ValueError, KeyError) as error:
        raise PeerError(f"--vllm: a line that cannot be read: {line.strip()!r}: {error!r}") from error


def _shares(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def main(arguments: list[str]) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="bench.vllm_peer", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="of the peer's scripts")
    parser.add_argument(
        "--small", default="Qwen3-0.6B", choices=SHAPES, help="random weights of this shape (%(default)s)"
    )
    parser.add_argument("--large", default="Qwen3-32B", choices=SHAPES, help="the same (%(default)s)")
    parser.add_argument(
        "--streams", type=whole_numbers, default="1,4,16", metavar="LIST", help="requests in flight (%(default)s)"
    )
    parser.add_argument(
        "--p", type=_shares, default="0.35,0.1", metavar="LIST", help="shares of hand-overs (%(default)s)"
    )
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="of each answer (%(default)s)")
    parser.add_argument("--limit", type=float, default=LIMIT, metavar="SECONDS", help="for everything (%(default)g)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    options = parser.parse_args(arguments)
    try:
        cases = run_std_serving(
            options.folder,
            small=options.small,
            large=options.large,
            streams=options.streams,
            shares=options.p,
            tokens=options.tokens,
            limit=options.limit,
        )
    except PeerError as error:
        print(f"bench.vllm_peer: {error}", file=sys.stderr)
        return 1
    if options.json:
        origin = surroundings(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        command = shlex.join(["python", "-m", "bench.vllm_peer", *arguments])
        content = {"command": command, **origin, "cases": [asdict(case) for case in cases]}
        options.json.write_text(json.dumps(content, indent=1))
    return 0


if __name__ == "__main__":
    run_command("bench.vllm_peer", lambda: main(sys.argv[1:]))
