"""vLLM's steps on the same card in the same run.

The folder is one of `bench.peer_folder` with the script
    bench_vllm.py --models SIZE --conc LIST --prompt N --out-len N --out FILE
which measures a random-weights Qwen3 of that size and appends one JSON object a line to FILE; those with a "conc" carry "step_ms"
(of a decode step), "prefill_plus_1_ms" and "vllm" (its version).
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.peer_folder import PeerError, installed
from bench.step_shapes import SHAPES


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
    if shape not in SHAPES:
        raise PeerError(f"--vllm: the peer runs published shapes only; name one with --shape: {', '.join(SHAPES)}")
    with installed(folder, "bench_vllm.py") as script:
        lines = script.scratch / "peer.jsonl"
        arguments = [
            f"--models={shape.removeprefix('Qwen3-')}",
            f"--conc={','.join(map(str, batches))}",
            f"--prompt={prompt}",
            f"--out-len={output}",
            f"--out={lines}",
        ]
        done = subprocess.run(script.command(arguments), env=script.environment())
        if done.returncode:
            raise script.fault(done.returncode)
        return _steps(lines)


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
