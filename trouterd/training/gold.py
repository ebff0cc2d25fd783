"""The answers that heads are trained along."""

from __future__ import annotations

from collections.abc import Sequence

from trouterd.training.pair import Pair
from trouterd.training.prompts import Prompt
from trouterd.training.writing import write


def gold_answers(pair: Pair, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Each prompt's `completion`, cut to the budget; the large model's greedy answer where it has none."""
    missing = [prompt.ids for prompt in prompts if prompt.completion is None]
    written = iter(write(pair.large, missing, pair.limit, pair.eos_ids))
    return [
        list(prompt.completion[: pair.limit]) if prompt.completion is not None else next(written) for prompt in prompts
    ]
