import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trouterd.demo.problems import Problem, final_answer, generate, split_of
from trouterd.demo.story import LARGEST_NUMBER

STEP = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")


def numbers(text: str) -> set[int]:
    return {int(number) for number in re.findall(r"\d+", text)}


def check_solution(problem: Problem) -> None:
    """Every step is right and uses only numbers that the question gave or an earlier step made."""
    steps = STEP.findall(problem.solution)
    assert 2 <= len(steps) <= 4
    known = numbers(problem.question)
    for left, sign, right, result in steps:
        a, b, c = int(left), int(right), int(result)
        assert {a, b} <= known
        assert c * b == a if sign == "/" else c == {"+": a + b, "-": a - b, "*": a * b}[sign]
        assert 2 <= c <= LARGEST_NUMBER
        known.add(c)
    assert problem.answer == int(steps[-1][3]) == final_answer(problem.solution)


@given(st.integers(0, 2**32))
@settings(max_examples=25, deadline=None)
def test_solutions_are_right_and_follow_from_the_question(seed: int) -> None:
    for problem in generate(seed, 20):
        check_solution(problem)


def test_problems_depend_on_seed_count_and_split_alone() -> None:
    assert generate(3, 50) == generate(3, 50)
    assert generate(3, 50) == generate(3, 80)[:50]
    assert generate(3, 50) != generate(4, 50)


def test_no_held_out_question_can_be_in_training_data() -> None:
    held_out, train = generate(5, 60, "held_out"), generate(5, 2000)
    assert all(split_of(problem.question) == "held_out" for problem in held_out)
    assert all(split_of(problem.question) == "train" for problem in train)
    assert len({problem.question for problem in held_out}) == 60


def test_one_question_has_one_solution() -> None:
    seen: dict[str, str] = {}
    for seed in range(40):
        for problem in generate(seed, 250):
            assert seen.setdefault(problem.question, problem.solution) == problem.solution


def test_questions_read_as_sentences() -> None:
    for problem in generate(8, 500):
        assert problem.question.endswith("?")
        assert problem.question[0].isupper() or problem.question[0].isdigit()
        assert "  " not in problem.question + problem.solution
        assert not re.search(r"\b1 \w+s\b", problem.question)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("3 + 4 = 7. The answer is 7.", 7),
        ("The answer is 7. The answer is 12.", 12),
        ("The answer is -3.", -3),
        ("The answer is 7", None),
        ("Hello! Ask me an arithmetic word problem.", None),
    ],
)
def test_final_answer(text: str, answer: int | None) -> None:
    assert final_answer(text) == answer
