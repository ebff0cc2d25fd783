"""When an answer counts as right: a rule of the final answer, without case, spaces, dollar signs and thousands separators."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal, get_args

from trouterd.training.judge import final_answer, normal_answer

Rule = Literal["exact", "last_number", "contains"]
RULES: tuple[Rule, ...] = get_args(Rule)
_NUMBER = re.compile(r"(?<![\w.,])-?\d[\d,]*(?:\.\d+)?")


def exact(text: str, answer: str) -> bool:
    r"""The answer that the text states last (\boxed{...}, "#### ...", "the answer is ..."), or all of it, is the right one."""
    stated = final_answer(text)
    return (normal_answer(text) if stated is None else stated) == normal_answer(answer)


def last_number(text: str, answer: str) -> bool:
    """The last number of the text is the right one."""
    numbers: list[str] = _NUMBER.findall(text)
    return bool(numbers) and normal_answer(numbers[-1]) == normal_answer(answer)


def contains(text: str, answer: str) -> bool:
    """The right answer stands in the text, not as a part of a longer word or number."""
    words = r"\s+".join(re.escape(word) for word in answer.casefold().split())
    return re.search(rf"(?<!\w)(?<!\d[.,]){words}(?![.,]?\w)", text.casefold()) is not None


_JUDGES: dict[Rule, Callable[[str, str], bool]] = {"exact": exact, "last_number": last_number, "contains": contains}


def is_right(rule: Rule, text: str, answer: str) -> bool:
    """Whether a text gives the answer, by a rule."""
    return _JUDGES[rule](text, answer)


def answer_problem(rule: Rule, answer: str) -> str:
    """Why no text can be right by this rule; '' when one can."""
    if not answer.strip():
        return "'answer' is empty"
    if rule == "last_number" and not _NUMBER.fullmatch(answer.strip()):
        return f"'answer' is {answer!r}, which is no number; take another --judge"
    return ""
