"""The questions of a frontier: held-out problems of the demo, or a file of JSON lines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from bench.frontier_fault import FrontierUsageError
from bench.frontier_judge import Rule, answer_problem
from trouterd.demo.client import MAX_TOKENS as DEMO_TOKENS
from trouterd.demo.problems import generate
from trouterd.demo.report import REPORT_SEED

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class _Line(msgspec.Struct):
    """One line of a data set; other fields are left alone."""

    answer: str | int | float
    messages: list[dict[str, Any]] | None = None
    prompt: str | None = None


@dataclass(frozen=True, slots=True)
class Question:
    """What a request asks, and the right answer."""

    path: str
    """Of the endpoint."""
    body: Mapping[str, Any]
    """`messages` or `prompt`."""
    answer: str


@dataclass(frozen=True, slots=True)
class Task:
    """Questions and how their answers are judged."""

    name: str
    questions: tuple[Question, ...]
    judge: Rule
    max_tokens: int
    """Of one answer."""


def demo_task(count: int) -> Task:
    """Problems that the demo pair was not trained on."""
    questions = [
        Question(CHAT, {"messages": [{"role": "user", "content": problem.question}]}, str(problem.answer))
        for problem in generate(REPORT_SEED, count, "held_out")
    ]
    return Task("demo", tuple(questions), "exact", DEMO_TOKENS)


def file_task(path: Path, count: int, judge: Rule, max_tokens: int) -> Task:
    """The first `count` questions of a file.

    Raises:
        FrontierUsageError: it cannot be read, holds no question, or a line cannot be used, with its number.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise FrontierUsageError(f"--dataset {path}: {error.strerror or error}") from error
    questions: list[Question] = []
    for number, line in enumerate(lines, 1):
        if line.strip() and len(questions) < count:
            try:
                questions.append(_question(msgspec.json.decode(line, type=_Line), judge))
            except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
                raise FrontierUsageError(f"--dataset {path}: line {number}: {error}") from error
    if not questions:
        raise FrontierUsageError(f"--dataset {path}: holds no question")
    return Task(path.name, tuple(questions), judge, max_tokens)


def _question(line: _Line, judge: Rule) -> Question:
    answer = str(line.answer)
    if problem := answer_problem(judge, answer):
        raise ValueError(problem)
    if (line.prompt is None) == (line.messages is None):
        raise ValueError("expected either 'prompt' or 'messages'")
    if line.messages is not None:
        return Question(CHAT, {"messages": line.messages}, answer)
    return Question(COMPLETIONS, {"prompt": line.prompt}, answer)
