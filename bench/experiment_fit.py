"""Whether the models of an experiment are there, and whether what they are asked fits into them."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.deployment import SCRIPT, SCRIPT_TOKENS
from bench.experiment_case import CaseError
from bench.experiment_setup import BUILTIN_DIRECTORIES, Setup
from bench.step_shapes import SHAPES, write_shape
from bench.workloads import find
from models.config import ModelError
from models.shape import load_shape

_SHORT = (100, 256)
"""Prompt and answer of a workload for small contexts."""


def fitting(setup: Setup, workloads: Sequence[str]) -> None:
    """Look whether all models are there and can take all workloads.

    Raises:
        CaseError: one is not, or cannot; the message says which option helps.
    """
    contexts = {}
    for name, source in zip(setup.names, setup.sources, strict=True):
        longest = _context(f"--{name}", source)
        contexts[name] = int(setup.settings.of_model(name).get("context_length", 0)) or longest
    tightest = min(contexts, key=contexts.__getitem__)
    most = contexts[tightest]
    needs = {workload: find(workload).context for workload in workloads}
    if too_long := [f"{workload} ({tokens:,} tokens)" for workload, tokens in needs.items() if tokens > most]:
        fit = [workload for workload, tokens in needs.items() if tokens <= most] or [_short(most)]
        source = setup.sources[setup.names.index(tightest)]
        raise CaseError(
            f"--workloads: {', '.join(too_long)}: more than the {most:,} of the context of {source}, prompt and answer"
            f" together; name others, such as --workloads {','.join(fit)}"
        )


def _short(most: int) -> str:
    prompt, answer = _SHORT if sum(_SHORT) <= most else (most // 4, most // 2)
    return f"{prompt}/{answer}"


def _context(flag: str, source: str) -> int:
    """Most tokens that a model takes."""
    if source.startswith(SCRIPT):
        _check_script(flag, source)
        return SCRIPT_TOKENS
    with tempfile.TemporaryDirectory() as name:
        known = BUILTIN_DIRECTORIES.get(source, Path(source))
        directory = write_shape(source, Path(name)) if source in SHAPES else known
        if not directory.is_dir():
            shapes = ", ".join(SHAPES)
            raise CaseError(
                f"{flag} {source}: no such directory; there are {', '.join(BUILTIN_DIRECTORIES)}, {SCRIPT}MS and {shapes}"
            )
        try:
            return load_shape(directory).context_length
        except ModelError as error:
            raise CaseError(f"{flag}: {error}") from error


def _check_script(flag: str, source: str) -> None:
    try:
        delay = float(source.removeprefix(SCRIPT))
    except ValueError:
        delay = -1.0
    if not 0 <= delay < float("inf"):
        raise CaseError(f"{flag} {source}: expected {SCRIPT}MS with the milliseconds of a step, such as {SCRIPT}6")
