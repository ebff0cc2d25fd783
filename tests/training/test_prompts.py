"""Prompt files: what they may hold, and where their mistakes are."""

from __future__ import annotations

from pathlib import Path

import pytest

from models.tokenizer import Tokenizer
from trouterd.demo import SMALL_DIRECTORY
from trouterd.demo.problems import split_of
from trouterd.training.faults import TrainingError
from trouterd.training.prompts import load_prompts

TOKENIZER = Tokenizer.load(SMALL_DIRECTORY)


def load(path: Path, *lines: str, **options: float) -> object:
    path.write_text("\n".join(lines) + "\n")
    return load_prompts(str(path), TOKENIZER, 0, **options)  # type: ignore[arg-type]


def test_lines_become_prompts(tmp_path: Path) -> None:
    lines = [f'{{"prompt": "What is {n}?", "answer": {n}}}' for n in range(8)]
    lines += ['{"messages": [{"role": "user", "content": "Hi"}], "completion": "The answer is 1."}', ""]
    found = load(tmp_path / "p.jsonl", *lines)
    by_text = {TOKENIZER.decode(prompt.ids, skip_special=False): prompt for prompt in found.all}
    assert len(found.all) == 9
    assert by_text["What is 3?"].answer == "3"
    chat = by_text["<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"]
    assert chat.completion[-1] in TOKENIZER.eos_ids
    assert TOKENIZER.decode(chat.completion) == "The answer is 1."


def test_equal_questions_stay_together(tmp_path: Path) -> None:
    lines = [f'{{"prompt": "Q{n % 10}", "answer": {n}}}' for n in range(40)]
    found = load(tmp_path / "p.jsonl", *lines)
    uses = [{prompt.ids for prompt in part} for part in (found.train, found.validation, found.held_out)]
    assert [len(part) for part in uses] == [6, 2, 2]
    assert len(set.union(*uses)) == 10
    assert found == load(tmp_path / "p.jsonl", *lines)
    assert len(load(tmp_path / "p.jsonl", *lines, limit=5).all) == 5


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "line 2: Input data was truncated"),
        ('{"prompt": 3}', r"line 2: Expected `str \| null`, got `int` - at `\$.prompt`"),
        ('{"promt": "x"}', "line 2: Object contains unknown field `promt`"),
        ('{"prompt": "x", "messages": []}', "line 2: expected either 'prompt' or 'messages'"),
        ('{"answer": 3}', "line 2: expected either"),
        ('{"prompt": ""}', "line 2: the prompt is empty"),
    ],
)
def test_mistakes_name_their_line(tmp_path: Path, line: str, problem: str) -> None:
    with pytest.raises(TrainingError, match=problem):
        load(tmp_path / "p.jsonl", '{"prompt": "fine"}', line)


def test_sources_that_hold_nothing(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="No such file"):
        load_prompts(str(tmp_path / "none.jsonl"), TOKENIZER, 0)
    with pytest.raises(TrainingError, match="holds no prompt"):
        load(tmp_path / "p.jsonl")
    with pytest.raises(TrainingError, match="3 different prompts; at least 4"):
        load(tmp_path / "p.jsonl", *(f'{{"prompt": "{n}"}}' for n in (1, 2, 3, 3)))
    with pytest.raises(TrainingError, match="expected demo:COUNT"):
        load_prompts("demo:two", TOKENIZER, 0)
    with pytest.raises(TrainingError, match="--limit: 3 prompts; at least 4"):
        load_prompts("demo", TOKENIZER, 0, limit=3)


def test_demo_problems_are_held_out_as_for_the_pair_itself() -> None:
    found = load_prompts("demo:40", TOKENIZER, 5)
    assert [len(part) for part in (found.train, found.validation, found.held_out)] == [28, 6, 6]

    def question(ids: tuple[int, ...]) -> str:
        return TOKENIZER.decode(ids, skip_special=False).split("user\n")[1].split("<|im_end|>")[0]

    assert {split_of(question(prompt.ids)) for prompt in found.held_out} == {"held_out"}
    assert {split_of(question(prompt.ids)) for prompt in found.train + found.validation} == {"train"}
