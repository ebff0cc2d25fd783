"""Checkpoints of the sweeps that need one: given, kept from an earlier run, or trained."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from bench.frontier_fault import FrontierError, FrontierUsageError
from bench.frontier_pair import TRAINING, Pair
from bench.frontier_sweeps import Sweep
from trouterd.interpreter import environment, module_command
from trouterd.training.train import Sidecar, sidecar_path


@dataclass(frozen=True, slots=True)
class Training:
    """How heads are trained."""

    work: Path
    """A folder; checkpoints that it holds of the same pair and prompts are taken as they are."""
    prompts: str
    """As `trouterd train --prompts` takes them; none of them may be a question of the task. '': nothing is trained."""
    max_tokens: int
    threads: int = 1


def given_heads(texts: Iterable[str], sweeps: Iterable[Sweep]) -> dict[str, Path]:
    """Sweep -> checkpoint, from NAME=FILE.

    Raises:
        FrontierUsageError: no such sweep or file.
    """
    names = [sweep.name for sweep in sweeps if sweep.head]
    files = {}
    for text in texts:
        name, equals, file = text.partition("=")
        if not equals or name not in names:
            raise FrontierUsageError(
                f"--checkpoint {text}: expected NAME=FILE with NAME one of {', '.join(names) or 'none'}"
            )
        if not Path(file).exists():
            raise FrontierUsageError(f"--checkpoint {text}: no file {file}")
        files[name] = Path(file)
    return files


def trained_heads(pair: Pair, sweeps: Iterable[Sweep], training: Training) -> dict[str, Path]:
    """Checkpoints of those sweeps that need one; what `trouterd train` says goes to standard error.

    Raises:
        FrontierError: a training failed; it has said why.
    """
    if not training.prompts:
        return {}
    return {sweep.name: _trained(pair, sweep, training) for sweep in sweeps if sweep.head}


def _trained(pair: Pair, sweep: Sweep, training: Training) -> Path:
    training.work.mkdir(parents=True, exist_ok=True)
    output = training.work / f"{sweep.name}.pt"
    if _fits(output, pair, training):
        return output
    config = training.work / "pair.toml"
    config.write_text(pair.configuration((), {}))
    arguments = [sweep.head, "-c", str(config), "--route", TRAINING, "--prompts", training.prompts]
    arguments += ["--max-tokens", str(training.max_tokens), "--threads", str(training.threads), "--output", str(output)]
    done = subprocess.run(
        module_command("trouterd.cli", "train", *arguments), stdout=subprocess.DEVNULL, env=environment()
    )
    if done.returncode:
        raise FrontierError(f"trouterd train {' '.join(arguments)}: exit code {done.returncode}")
    return output


def refined(sweeps: Iterable[Sweep], checkpoints: Mapping[str, Path]) -> list[Sweep]:
    """The sweeps, those of heads at the thresholds that the report of their training has."""
    sidecars = {name: _sidecar(file) for name, file in checkpoints.items()}
    return [
        sweep.refined({point.threshold: point.share for point in sidecar.report.curve})
        if (sidecar := sidecars.get(sweep.name))
        else sweep
        for sweep in sweeps
    ]


def _fits(checkpoint: Path, pair: Pair, training: Training) -> bool:
    sidecar = _sidecar(checkpoint) if checkpoint.exists() else None
    if sidecar is None or sidecar.prompts != training.prompts:
        return False
    paths = [pair.config.models[name].path for name in (pair.small, pair.large)]
    return paths == [sidecar.model, sidecar.large_model]


def _sidecar(checkpoint: Path) -> Sidecar | None:
    try:
        return msgspec.json.decode(sidecar_path(checkpoint).read_bytes(), type=Sidecar)
    except (OSError, msgspec.DecodeError):
        return None
