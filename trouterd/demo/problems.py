"""Arithmetic word problems in plain English with worked solutions: the task of the demo pair."""

import hashlib
import random
import re
from typing import Literal

from trouterd.demo.scenarios import SCENARIOS
from trouterd.demo.story import Problem, Story

__all__ = ["Problem", "Split", "final_answer", "generate", "split_of"]

Split = Literal["train", "held_out"]


def split_of(question: str) -> Split:
    """The split that a question text belongs to: one text in 32 is held out, whatever seed produced it."""
    digest = hashlib.blake2b(question.encode(), digest_size=1).digest()
    return "held_out" if digest[0] < 8 else "train"


def generate(seed: int, count: int, split: Split = "train") -> list[Problem]:
    """Make `count` different problems of one split.

    The result depends on the arguments alone. Random streams and texts both differ between splits: no held-out
    question can occur in training data.
    """
    rng = random.Random(f"trouterd demo {split} {seed}")  # noqa: S311 (a data set, not a secret)
    problems: dict[str, Problem] = {}
    while len(problems) < count:
        story = Story(rng)
        rng.choice(SCENARIOS)(story)
        problem = story.problem()
        if story.usable and split_of(problem.question) == split:
            problems.setdefault(problem.question, problem)
    return list(problems.values())


def final_answer(text: str) -> int | None:
    """The number in the last "The answer is N." of a solution, or None if it states none."""
    stated: list[str] = re.findall(r"The answer is (-?\d+)\.", text)
    return int(stated[-1]) if stated else None
