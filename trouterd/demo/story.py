"""A story under construction: the sentences of a word problem and the worked steps that solve it."""

import random
from dataclasses import dataclass
from typing import Literal

LARGEST_NUMBER = 999
"""No problem states or reaches a number above this one."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One question, its integer answer and the worked solution that a model should write for it."""

    question: str
    answer: int
    solution: str


class Story:
    """Collects the sentences of a question and the steps of its solution; each step is computed as it is written."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.consistent = True
        self.operations = 0
        self._question: list[str] = []
        self._steps: list[str] = []
        self._last = 0

    def number(self, low: int, high: int) -> int:
        return self.rng.randint(low, high)

    def tell(self, *phrasings: str) -> None:
        """Add one of several ways to say the same thing to the question."""
        self._question.append(self.rng.choice(phrasings))

    def note(self, text: str) -> None:
        """Add a sentence without arithmetic to the solution."""
        self._steps.append(text)

    def step(self, left: int, sign: Literal["+", "-", "*", "/"], right: int, before: str = "", after: str = "") -> int:
        """Write "before left sign right = result after." and return the result.

        A result outside 2..LARGEST_NUMBER or a division with a remainder makes the story inconsistent.
        """
        match sign:
            case "+":
                result = left + right
            case "-":
                result = left - right
            case "*":
                result = left * right
            case _:
                result = left // right
        exact = sign != "/" or result * right == left
        self.consistent = self.consistent and exact and all(2 <= n <= LARGEST_NUMBER for n in (left, right, result))
        parts = [before, str(left), sign, str(right), "=", str(result), after]
        self._steps.append(" ".join(part for part in parts if part) + ".")
        self._last = result
        self.operations += 1
        return result

    def divisor(self, number: int) -> int:
        """A divisor of `number` in 2..9 that leaves at least 2; without one the story is inconsistent."""
        divisors = [d for d in range(2, 10) if number % d == 0 and number // d >= 2]
        if not divisors:
            self.consistent = False
            return 2
        return self.rng.choice(divisors)

    @property
    def usable(self) -> bool:
        """Whether the story makes sense and takes 2 to 4 operations."""
        return self.consistent and 2 <= self.operations <= 4

    def problem(self) -> Problem:
        solution = " ".join([*self._steps, f"The answer is {self._last}."])
        return Problem(" ".join(self._question), self._last, solution)
