"""Final answers and sentences."""

from __future__ import annotations

import pytest

from trouterd.training.judge import ends_sentence, final_answer, is_right, same_answer, same_text


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("3 + 4 = 7. The answer is 7.", "7"),
        ("The answer is 3. No: the answer is -12.", "-12"),
        (r"so \boxed{\frac{1}{2}} it is", r"\frac{1}{2}"),
        ("work\n#### 1,234", "1234"),
        ("Answer: (B)\nbye", "b"),
        ("the answer is 2.50.", "2.5"),
        ("no idea", None),
    ],
)
def test_final_answer(text: str, answer: str | None) -> None:
    assert final_answer(text) == answer


def test_right_and_same() -> None:
    assert is_right("The answer is $1,000.", "1000.0")
    assert not is_right("I do not know.", "7")
    assert same_answer("First 2. The answer is 7.", "The answer is 7")
    assert not same_answer("The answer is 7.", "It is 7.")
    assert same_answer("It is seven.", "it is  Seven")
    assert same_text("Then he has 3.", "then he has 3")
    assert not same_text("Then he has 3.", "Then he has 4.")
    assert [ends_sentence(text) for text in ("a.", "a. ", "a\n", "3.5", "(")] == [True, True, True, False, False]
