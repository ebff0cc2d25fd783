"""vLLM on the same card in the same run, through a folder that knows how to run it without our help.

The folder holds two scripts:
    unpack.py FOLDER TARGET     puts vLLM into TARGET (left out if there is nothing to install)
    bench_vllm.py --models SIZE --conc LIST --prompt N --out-len N --out FILE
                                measures a random-weights Qwen3 of that size and appends one JSON object a line to FILE; those with
                                a "conc" carry "step_ms" (of a decode step), "prefill_plus_1_ms" and "vllm" (its version).
                                VLSITE in its environment is TARGET.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.step_shapes import SHAPES


class PeerError(Exception):
    """The peer cannot be run; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class PeerStep:
    """The peer at one concurrency."""

    version: str
    batch: int
    step_ms: float
    prompts_ms: float
    """Prompts and the first token."""


def run_peer(folder: Path, shape: str | None, batches: Sequence[int], prompt: int, output: int) -> list[PeerStep]:
    """Install and measure; takes minutes, prints what the scripts print.

    Raises:
        PeerError: no such scripts, a shape that they do not know, or they failed.
    """
    script, installer = folder / "bench_vllm.py", folder / "unpack.py"
    if not script.is_file():
        raise PeerError(f"--vllm: {script} is not there")
    if shape not in SHAPES:
        raise PeerError(f"--vllm: the peer runs published shapes only; name one with --shape: {', '.join(SHAPES)}")
    with tempfile.TemporaryDirectory() as scratch:
        site, lines = Path(scratch) / "site", Path(scratch) / "peer.jsonl"
        if installer.is_file():
            _run([str(installer), str(folder), str(site)], {})
        arguments = [
            f"--models={shape.removeprefix('Qwen3-')}",
            f"--conc={','.join(map(str, batches))}",
            f"--prompt={prompt}",
            f"--out-len={output}",
            f"--out={lines}",
        ]
        _run([str(script), *arguments], {"VLSITE": str(site)})
        return _steps(lines)


def _run(arguments: list[str], environment: dict[str, str]) -> None:
    done = subprocess.run([sys.executable, *arguments], env=os.environ | environment)
    if done.returncode:
        raise PeerError(f"--vllm: {arguments[0]} ended with {done.returncode}")


def _steps(lines: Path) -> list[PeerStep]:
    try:
        records = [json.loads(line) for line in lines.read_text().splitlines()]
        return [
            PeerStep(record["vllm"], record["conc"], record["step_ms"], record["prefill_plus_1_ms"])
            for record in records
            if "conc" in record
        ]
    except (OSError, ValueError, KeyError) as error:
        raise PeerError(f"--vllm: its result cannot be read: {error!r}") from error
