"""What heads are trained on: prompts from a JSONL file or of the demo task, split by question."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from models.chat_template import ChatTemplateError
from models.tokenizer import Tokenizer
from trouterd.demo.problems import Problem, generate
from trouterd.training.faults import TrainingError

DEMO = "demo"
DEMO_COUNT = 500
"""Problems behind `--prompts demo`."""
FEWEST = 4
"""Prompts that can be split at all: two to learn from, one to stop by and one to report on."""


class Line(msgspec.Struct, forbid_unknown_fields=True):
    """One line of a prompts file."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    answer: str | int | float | None = None
    """The right final answer."""
    completion: str | None = None
    """A right answer in full, with whatever reasoning leads to it."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question as the models see it, and what is known of its answer."""

    ids: tuple[int, ...]
    answer: str | None = None
    completion: tuple[int, ...] | None = None
    """Ids of a right answer, the end of the answer included."""


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Prompts by use; no question is in two of them."""

    train: tuple[Prompt, ...]
    validation: tuple[Prompt, ...]
    """Choose epoch and threshold."""
    held_out: tuple[Prompt, ...]
    """Are reported on, and nothing else."""

    @property
    def all(self) -> tuple[Prompt, ...]:
        """Every prompt, in the order of the uses."""
        return self.train + self.validation + self.held_out


def load_prompts(
    source: str, tokenizer: Tokenizer, seed: int, *, limit: int = 0, validation: float = 0.15, held_out: float = 0.15
) -> PromptSet:
    """The prompts of a source by use.

    Args:
        source: a JSONL file, or 'demo' or 'demo:COUNT' for generated problems of the demo pair; those that are held out come
            from the split that the pair itself has not been trained on.
        tokenizer: of the pair.
        seed: of the split and of generated problems.
        limit: use the first ones only; 0 = all.
        validation: part of the different prompts.
        held_out: part of the different prompts.

    Raises:
        TrainingError: no such file, a line that cannot be used, with its number, or too few different prompts.
    """
    name, colon, count = source.partition(":")
    if name != DEMO:
        return split(_read_file(Path(source), tokenizer)[: limit or None], seed, validation, held_out)
    if colon and not (count.isascii() and count.isdigit() and int(count) >= FEWEST):
        raise TrainingError(f"--prompts {source}: expected demo:COUNT with a count of at least {FEWEST}")
    asked = int(count or DEMO_COUNT)
    total = min(asked, limit or asked)
    if total < FEWEST:
        raise TrainingError(f"--limit: {total} prompts; at least {FEWEST} are needed")
    kept, late = (max(1, round(part * total)) for part in (held_out, validation))
    known = [_demo_prompt(problem, tokenizer) for problem in generate(seed, total - kept)]
    unknown = [_demo_prompt(problem, tokenizer) for problem in generate(seed, kept, "held_out")]
    return PromptSet(tuple(known[late:]), tuple(known[:late]), tuple(unknown))


def split(prompts: Sequence[Prompt], seed: int, validation: float, held_out: float) -> PromptSet:
    """Deal prompts out by question: equal prompts fall on the same side. At least one is kept for each use.

    Raises:
        TrainingError: too few different prompts.
    """
    by_question: dict[tuple[int, ...], list[Prompt]] = {}
    for prompt in prompts:
        by_question.setdefault(prompt.ids, []).append(prompt)
    questions = list(by_question.values())
    if len(questions) < FEWEST:
        raise TrainingError(f"--prompts: {len(questions)} different prompts; at least {FEWEST} are needed")
    random.Random(seed).shuffle(questions)  # noqa: S311 (a split, not a secret)
    first = max(1, round(held_out * len(questions)))
    second = first + max(1, round(validation * len(questions)))
    parts = (questions[second:], questions[first:second], questions[:first])
    return PromptSet(*(tuple(prompt for question in part for prompt in question) for part in parts))


def _read_file(path: Path, tokenizer: Tokenizer) -> list[Prompt]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise TrainingError(f"--prompts: {path}: {error.strerror or error}") from error
    prompts = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                prompts.append(_prompt(msgspec.json.decode(line, type=Line), tokenizer))
            except (msgspec.DecodeError, ChatTemplateError, ValueError) as error:
                raise TrainingError(f"--prompts: {path}: line {number}: {error}") from error
    if not prompts:
        raise TrainingError(f"--prompts: {path}: holds no prompt")
    return prompts


def _prompt(line: Line, tokenizer: Tokenizer) -> Prompt:
    if (line.prompt is None) == (line.messages is None):
        raise ValueError("expected either 'prompt' or 'messages'")
    if line.messages is not None:
        ids = tokenizer.encode_chat(line.messages, add_generation_prompt=True)
    else:
        ids = tokenizer.encode(line.prompt or "")
    if not ids:
        raise ValueError("the prompt is empty")
    answer = None if line.answer is None else str(line.answer)
    return Prompt(tuple(ids), answer, _completion(line.completion, tokenizer))


def _demo_prompt(problem: Problem, tokenizer: Tokenizer) -> Prompt:
    ids = tokenizer.encode_chat([{"role": "user", "content": problem.question}], add_generation_prompt=True)
    return Prompt(tuple(ids), str(problem.answer), _completion(problem.solution, tokenizer))


def _completion(text: str | None, tokenizer: Tokenizer) -> tuple[int, ...] | None:
    if text is None:
        return None
    ids = tokenizer.encode(text, add_special=False)
    return (*ids, *sorted(tokenizer.eos_ids)[:1])
