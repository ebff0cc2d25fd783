"""Lengths, shared beginnings, seeds and data sets."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.workloads import AGENT, FIRST_ID, HIGH, LAST_ID, LOW, Workload, find


@pytest.mark.parametrize(("workload", "prompt", "answer"), [(LOW, 100, 2048), (HIGH, 100, 8192)])
def test_one_turn(workload: Workload, prompt: int, answer: int) -> None:
    (turn,) = workload.conversation(5)
    assert (len(turn.said), turn.max_tokens) == (prompt, answer)
    assert all(isinstance(token, int) and FIRST_ID <= token <= LAST_ID for token in turn.said)
    assert workload.context == prompt + answer
    assert workload.ignore_eos


def test_agents_share_a_beginning_and_reach_their_context() -> None:
    one, other = AGENT.conversation(1), AGENT.conversation(2)
    assert [len(turn.said) for turn in one] == [3584, 512, 512, 512]
    assert {turn.max_tokens for turn in one} == {1024}
    assert AGENT.context == 8192 + 1024
    assert one[0].said[:2048] == other[0].said[:2048]
    assert one[0].said[2048:2060] != other[0].said[2048:2060]
    assert one[1].said != other[1].said != one[2].said


@pytest.mark.parametrize(
    ("part", "prompt", "wanted"),
    [
        (0.0, 3584, [1024, 1024, 1024, 1024]),
        (0.125, 3584 + 512, [512, 1024, 1024, 1024]),
        (0.5, 3584 + 1024 + 512 + 1024 + 512, [1024, 1024]),
        (0.9999, 8192 + 1023, [1]),
    ],
)
def test_a_conversation_that_is_under_way(part: float, prompt: int, wanted: list[int]) -> None:
    first, *later = AGENT.midway(3, part)
    assert (len(first.said), [turn.max_tokens for turn in (first, *later)]) == (prompt, wanted)
    assert not first.whole
    assert later == AGENT.conversation(3)[4 - len(later) :]
    assert first.said[:3584] == AGENT.conversation(3)[0].said
    assert first.said != AGENT.midway(4, part)[0].said


def test_what_is_under_way_at_once_is_as_long_as_it_is_in_the_mean() -> None:
    lengths = [len(LOW.midway(number, (number + 0.5) / 64)[0].said) for number in range(64)]
    assert sum(lengths) / 64 == pytest.approx(100 + 1024, abs=1)
    assert len({*lengths}) == 64
    assert [one.under_way for one in (LOW, HIGH, AGENT)] == [100 + 1024, 100 + 4096, 5888 - 2048 + 512]
    with pytest.raises(ValueError, match="expected less than 1"):
        LOW.midway(0, 1.0)


def test_prompts_come_from_the_seed() -> None:
    assert find("agent").seeded("3").conversation(7) == AGENT.seeded("3").conversation(7)
    assert LOW.seeded("1").conversation(0) != LOW.seeded("2").conversation(0)
    assert AGENT.seeded("1").conversation(0)[0].said[:9] != AGENT.seeded("2").conversation(0)[0].said[:9]


def test_cut() -> None:
    cut = find("high", cut=500)
    assert cut.conversation(0)[0].max_tokens == 500
    assert cut.label == "high, answers cut to 500"
    assert find("30/40", cut=500).conversation(0)[0].max_tokens == 40
    assert find("30/40").label == "30/40"


def test_data_set(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text(
        '{"messages": [{"role": "user", "content": "2 + 2?"}], "answer": 4}\n\n'
        '{"prompt": "Once", "max_tokens": 9}\n{"prompt": [5, 6, 7]}\n'
    )
    workload = find(str(path), cut=100)
    said = [workload.conversation(number) for number in range(4)]
    assert said[0][0].said == ({"role": "user", "content": "2 + 2?"},)
    assert said[0] == said[3]
    assert [(turn.said, turn.max_tokens) for (turn,) in said[1:3]] == [("Once", 9), ((5, 6, 7), 100)]
    assert workload.midway(1, 0.5) == said[1]
    assert workload.under_way == 0
    assert not workload.ignore_eos
    assert workload.label == "questions, answers cut to 100"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no line"),
        ("{}", "line 1: expected either"),
        ('{"prompt": "a"}\n{"prompt": "a", "messages": []}', "line 2: expected either"),
        ('{"prompt": ""}', "line 1: the prompt is empty"),
        ('{"prompt": "a", "max_tokens": 0}', "line 1: .*max_tokens"),
        ("no json", "line 1: "),
    ],
)
def test_unusable_data_sets(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=f"x.jsonl: {message}"):
        find(str(path))


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match="workload lwo: neither low, high, agent, nor IN/OUT, nor a file"):
        find("lwo")
    with pytest.raises(ValueError, match="both lengths"):
        find("0/5")
