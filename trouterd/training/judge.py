"""Whether two continuations come to the same: what makes a differing token a divergence, and an answer right."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal

JudgeName = Literal["answer", "text"]
Judge = Callable[[str, str], bool]
"""(one answer or continuation, another one) -> do they come to the same?"""
_STATED = (
    re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}"),
    re.compile(r"^####\s*(.+?)\s*$", re.MULTILINE),
    re.compile(r"\b(?:answer|result)\s*(?:is|:|=)\s*(.+?)\s*(?:\.(?!\d)|\n|$)", re.IGNORECASE),
)
_SENTENCE_END = re.compile(r"[.!?。！？\n]\s*$")


def final_answer(text: str) -> str | None:
    r"""The last final answer that a text states: \boxed{...}, a line "#### ...", or "answer is ..."; None without one."""
    for pattern in _STATED:
        stated = pattern.findall(text)
        if stated:
            return normal_answer(str(stated[-1]))
    return None


def normal_answer(answer: str) -> str:
    """An answer without case, spaces, dollar signs, thousands separators and a full stop; numbers in one spelling."""
    bare = re.sub(r"[\s$,()*]", "", answer).rstrip(".").lower()
    try:
        return f"{float(bare):.15g}" if abs(float(bare)) < 1e15 else bare
    except ValueError:
        return bare


def is_right(text: str, answer: str) -> bool:
    """Whether a text's final answer is the given one."""
    return final_answer(text) == normal_answer(answer)


def same_answer(one: str, other: str) -> bool:
    """Both state the same final answer, or, where neither states one, have the same words."""
    first, second = final_answer(one), final_answer(other)
    return same_text(one, other) if first is None and second is None else first == second


def same_text(one: str, other: str) -> bool:
    """The same words, whatever their case, spacing and punctuation at the end."""
    return _words(one) == _words(other)


def ends_sentence(text: str) -> bool:
    """Whether a sentence or a line ends here."""
    return _SENTENCE_END.search(text) is not None


def judge_named(name: JudgeName) -> Judge:
    """'answer' compares final answers, 'text' the words."""
    return same_answer if name == "answer" else same_text


def _words(text: str) -> list[str]:
    return text.casefold().rstrip(" .!?。！？\n").split()
