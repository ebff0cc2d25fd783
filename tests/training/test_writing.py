"""Reading and writing with a pair: against transformers, and against reading in other pieces."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer as Backend

from models.batch import StepOutput
from tests.training.pairs import demo_pair
from trouterd.demo import LARGE_DIRECTORY, SMALL_DIRECTORY, report
from trouterd.demo.problems import generate
from trouterd.training import reader as reading
from trouterd.training.sides import Sides
from trouterd.training.writing import Rule, write, write_routed

PROBLEMS = 8
NAMES = ("small", "large")


def prompts() -> list[list[int]]:
    backend = Backend.from_file(str(SMALL_DIRECTORY / "tokenizer.json"))
    return [report.prompt_ids(backend, problem.question) for problem in generate(3, PROBLEMS, "held_out")]


def test_answers_are_those_of_transformers() -> None:
    pair, ids = demo_pair(), prompts()
    backend = Backend.from_file(str(SMALL_DIRECTORY / "tokenizer.json"))
    small, large = report.load_model(SMALL_DIRECTORY), report.load_model(LARGE_DIRECTORY)
    alone = report.write_answers(backend, small, None, ids)
    assert write(pair.small, ids, 128, pair.eos_ids) == [answer.ids for answer in alone]
    both = report.write_answers(backend, small, large, ids, threshold=0.2)
    routed = write_routed(pair, ids, Sides(pair, NAMES, "entropy", {"threshold": 0.2}).rule())
    assert [(a.ids, a.by_large) for a in routed] == [(b.ids, b.by_large) for b in both]
    assert any(any(answer.by_large) for answer in routed)


def test_reading_in_small_pieces_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, ids = demo_pair(), prompts()

    def digest(output: StepOutput, following: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return output.hidden, output.logits.argmax(-1), following

    texts = [(text, 5 + number) for number, text in enumerate(ids)]
    whole = pair.small.read(texts, digest)
    monkeypatch.setattr(reading, "MOST_ROWS", 7)
    pieces = pair.small.read(texts, digest)
    for (text, first), one, other in zip(texts, whole, pieces, strict=True):
        assert one[2].tolist() == text[first:]
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert pair.small.read([], digest) == []


def test_what_is_read_predicts_what_is_written() -> None:
    pair, ids = demo_pair(), prompts()[:4]
    answers = write(pair.small, ids, 12, frozenset())
    texts = [([*prompt, *answer], len(prompt)) for prompt, answer in zip(ids, answers, strict=True)]
    read = pair.small.read(texts, lambda output, _: (output.logits.argmax(-1),))
    assert [rows[0].tolist() for rows in read] == answers


def test_continuations_end_where_they_are_told_to() -> None:
    pair, ids = demo_pair(), prompts()[:3]
    answers = write(pair.large, ids, 128, pair.eos_ids, lambda written: pair.text(written).endswith("."))
    assert all(pair.text(answer).count(".") == 1 for answer in answers)
    assert [len(answer) for answer in write(pair.large, ids, 5, pair.eos_ids)] == [5, 5, 5]


def test_one_decision_for_a_whole_answer() -> None:
    pair, ids = demo_pair(), prompts()[:6]
    large = write(pair.large, ids, 128, pair.eos_ids)
    small = write(pair.small, ids, 128, pair.eos_ids)
    wanted = torch.tensor([True, False] * 3)
    calls = 0

    def asks(output: StepOutput, tokens: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return wanted if calls == 1 else torch.zeros_like(tokens, dtype=torch.bool)

    rule = Rule(asks, lambda output, tokens, index: torch.ones_like(tokens, dtype=torch.bool))
    routed = write_routed(pair, ids, rule)
    for number, answer in enumerate(routed):
        assert answer.ids == (large if wanted[number] else small)[number]
        assert set(answer.by_large) == {bool(wanted[number])}
