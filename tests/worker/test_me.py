"""Ensembles through workers: shares, transitions and the mixture law by chi-squared tests of fixed draws, and live weights."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from tests.algorithms import reference
from tests.harness import Cluster
from tests.worker.lookup import LookupModel, LookupRunner
from tests.worker.test_oracle import MODELS, NAMES, PROMPT
from trouterd.config import Route

WEIGHTS = (0.5, 0.3, 0.2)
BOUND = {1: 10.83, 2: 13.82, 5: 20.52, 8: 26.12, 15: 37.70}
"""0.999 quantiles of chi-squared by degrees of freedom. Seeds are fixed: a test that passes once always does."""


def chi_squared(counts: Mapping[Any, int], law: Mapping[Any, float]) -> float:
    total = sum(counts.values())
    assert set(counts) <= {outcome for outcome, p in law.items() if p > 0}
    return sum((counts[outcome] - total * p) ** 2 / (total * p) for outcome, p in law.items() if p > 0)


def cluster(models: Mapping[str, LookupModel] = MODELS, **params: Any) -> Cluster:
    names = list(NAMES[: len(params["weights"])])
    runners = {name: LookupRunner(models[name]) for name in names}
    return Cluster(runners, {"demo": Route(models=names, algorithm="me", params=params)})


async def writers(workers: Cluster, count: int, length: int, params: Any = None) -> list[list[int]]:
    """Of `count` answers of `length` tokens."""
    sampling = {"max_tokens": length, "temperature": 1.0, "ignore_eos": True}
    pairs = [workers.submit("demo", PROMPT, params, seed=seed, **sampling) for seed in range(count)]
    await asyncio.gather(*(answer.done.wait() for _, answer in pairs))
    await workers.settled()
    return [answer.writers for _, answer in pairs]


async def test_shares_and_transitions() -> None:
    async with cluster(weights=WEIGHTS).running() as workers:
        answers = await writers(workers, 16, 64)
        sent = sum(worker.stats.handoffs.total() for worker in workers.workers.values())
    # Direct hops: one per change of writer.
    assert sent == sum(a != b for answer in answers for a, b in zip([0, *answer], answer, strict=False))
    law = dict(enumerate(WEIGHTS))
    assert chi_squared(Counter(w for answer in answers for w in answer), law) < BOUND[2]
    pairs = Counter(pair for answer in answers for pair in zip(answer, answer[1:], strict=False))
    assert chi_squared(pairs, {(i, j): p * q for i, p in law.items() for j, q in law.items()}) < BOUND[8]
    stays = Counter(i == j for i, j in pairs.elements())
    same = sum(weight**2 for weight in WEIGHTS)
    assert chi_squared(stays, {True: same, False: 1 - same}) < BOUND[1]
    first = Counter(answer[0] for answer in answers)
    assert set(first) == {0, 1, 2}


async def test_tokens_follow_the_mixture_of_the_models() -> None:
    models = {name: LookupModel(seed, vocab_size=4) for seed, name in enumerate(NAMES)}
    prompt = [1, 2]
    async with cluster(models, weights=WEIGHTS).running() as workers:
        drawn: Counter[tuple[int, ...]] = Counter()
        for start in range(0, 1200, 200):
            pairs = [
                workers.submit("demo", prompt, seed=seed, max_tokens=2, temperature=1.0, ignore_eos=True)
                for seed in range(start, start + 200)
            ]
            await asyncio.gather(*(answer.done.wait() for _, answer in pairs))
            drawn.update(tuple(answer.tokens) for _, answer in pairs)

    def mixture(ids: list[int]) -> list[float]:
        laws = [torch.softmax(models[name](ids).double(), dim=-1) for name in NAMES]
        return sum(w * law for w, law in zip(WEIGHTS, laws, strict=True)).tolist()

    law = {(a, b): p * q for a, p in enumerate(mixture(prompt)) for b, q in enumerate(mixture([*prompt, a]))}
    # The test needs expected counts that are not tiny: rare outcomes are put together.
    rare = {outcome for outcome, p in law.items() if p * 1200 < 5}
    merged = Counter({outcome: n for outcome, n in drawn.items() if outcome not in rare})
    rest = sum(law[outcome] for outcome in rare)
    if rest:
        merged["rare"] = sum(drawn[outcome] for outcome in rare)
    kept = {outcome: p for outcome, p in law.items() if outcome not in rare} | ({"rare": rest} if rest else {})
    assert len(kept) > 6
    assert chi_squared(merged, kept) < BOUND[15]


async def test_proportions_have_no_variance() -> None:
    async with cluster(weights=WEIGHTS, mode="proportions").running() as workers:
        answers = await writers(workers, 3, 100)
    assert answers == [answers[0]] * 3
    for end in range(1, 101):
        counts = Counter(answers[0][:end])
        assert all(abs(counts[model] - end * weight) <= 1 for model, weight in enumerate(WEIGHTS))
    assert Counter(answers[0]) == {0: 50, 1: 30, 2: 20}


async def test_weights_of_requests_and_live_changes() -> None:
    async with cluster(weights=(1, 1, 1)).running() as workers:
        alone = {f"weights.{model}": float(model == 1) for model in range(3)}
        first, *others = await asyncio.gather(
            writers(workers, 1, 30, alone), writers(workers, 4, 30, {"weights.0": 0.0})
        )
        assert first == [[1] * 30]
        assert {writer for answer in others[0] for writer in answer} == {1, 2}
        changed = Route(models=list(NAMES), algorithm="me", params={"weights": [0.0, 0.0, 2.0]})
        for worker in workers.workers.values():
            worker.configure("demo", changed)
        assert await writers(workers, 2, 10) == [[2] * 10] * 2


async def test_a_first_token_of_another_model_costs_the_entry_nothing_before_it_is_its_turn() -> None:
    async with cluster(weights=(1, 3)).running() as workers:
        seed = next(s for s in range(99) if [reference.drawn(s, 0, t, (1, 3)) for t in range(5)] == [1, 1, 1, 1, 0])
        entry = workers.workers["small"]
        answer = await workers.generate("demo", PROMPT, seed=seed, max_tokens=4, ignore_eos=True)
        assert answer.writers == [1] * 4
        await workers.settled()
        assert entry.stats.fed_rows == 0
        answer = await workers.generate("demo", PROMPT, seed=seed, max_tokens=5, ignore_eos=True)
        assert answer.writers == [1, 1, 1, 1, 0]
        await workers.settled()
        assert entry.stats.fed_rows == len(PROMPT) + 4


@pytest.mark.parametrize("weights", [(0.5, 0.3, 0.2), (1, 9)])
async def test_writers_depend_on_seed_and_position_alone(weights: tuple[float, ...]) -> None:
    """Batches of different sizes, and a pool that is too small for all."""
    async with cluster(weights=weights).running() as workers:
        answers = await writers(workers, 9, 40)
    expected = [[reference.drawn(seed, 0, t, weights) for t in range(40)] for seed in range(9)]
    assert answers == expected
    async with cluster(weights=weights).running() as workers:
        assert await writers(workers, 1, 40) == expected[:1]
