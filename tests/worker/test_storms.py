"""Whole clusters under random schedules and faults: who survives gets exactly what its writers write, and nothing is left."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, note, settings
from hypothesis import strategies as st

from ipc.messages import Sampling
from tests.algorithms import reference
from tests.algorithms.heads import write_defer
from tests.harness import Cluster
from tests.worker.lookup import HIDDEN, LookupModel, LookupRunner
from tests.worker.network import Job, Mood, Network
from trouterd.config import Route

NAMES = ("small", "large", "huge")
MODELS = {name: LookupModel(seed, vocab_size=24) for seed, name in enumerate(NAMES)}
EOS = 0
CONTEXT = 48
WANDER = str(Path(reference.__file__).with_name("wander.py"))
"""Decided by the host everywhere."""
TENSOR = str(Path(reference.__file__).with_name("wander_tensor.py"))
"""The same as devices decide it."""

ALGORITHMS: list[tuple[int, str, dict[str, Any]]] = [
    (2, "bernoulli", {"p": 0.4}),
    (2, "rstitch", {"tau": 0.2}),
    (2, "entropy", {"threshold": 0.45}),
    (2, "every_n", {"shape": "block", "n": 3}),
    (3, "every_n", {"shape": "block", "n": 1}),
    (3, "every_n", {"shape": "block", "n": 3}),
    (3, WANDER, {"keep": [False, False, False], "restless": 0.6}),
    (3, WANDER, {"keep": [False, True, False], "restless": 0.5}),
    (3, WANDER, {"keep": [True, False, True], "restless": 0.5}),
    (2, "speculative", {"gamma": 3}),
    (2, "cascade", {"mode": "speculative", "gamma": 4, "rule": "diff", "alpha": 0.2}),
    (2, "cascade", {"mode": "chunk", "chunk": 3, "threshold": -0.5}),
    (2, "cascade", {"mode": "sequence", "threshold": -1.0}),
    (2, TENSOR, {"keep": [False, True], "restless": 0.6}),
    (3, TENSOR, {"keep": [False, False, False], "restless": 0.6}),
    (3, TENSOR, {"keep": [False, True, False], "restless": 0.5}),
    (3, TENSOR, {"keep": [True, False, True], "restless": 0.5}),
    (2, "me", {"weights": [1, 2]}),
    (3, "me", {"weights": [0.2, 0.5, 0.3]}),
    (3, "me", {"weights": [0.2, 0.5, 0.3], "mode": "proportions"}),
    (2, "query", {"source": "length", "threshold": 6}),
    (2, "query", {"source": "random", "threshold": 0.4}),
]

FILES = tempfile.TemporaryDirectory()
DEFER = write_defer(Path(FILES.name, "defer.safetensors"), HIDDEN)
COMPOSING = {"checkpoint": str(Path(FILES.name, "defer.safetensors")), "threshold": 0.4, "mode": "compose"}

chance = st.sampled_from([0.0, 0.0, 0.02, 0.1])
moods = st.builds(
    Mood,
    full=st.sampled_from([0.0, 0.05, 0.4]),
    repeat=chance,
    death=st.sampled_from([0.0, 0.02, 0.06]),
    stall=st.sampled_from([0.0, 0.03, 0.1]),
    api_death=st.sampled_from([0.0, 0.0, 0.01]),
    abort=chance,
    tune=st.sampled_from([0.0, 0.1, 0.3]),
    lag=st.sampled_from([1, 2, 6]),
)
shapes = st.fixed_dictionaries(
    {
        "page_size": st.sampled_from([1, 3, 4]),
        "tokens": st.sampled_from([CONTEXT, CONTEXT, 2 * CONTEXT, 20 * CONTEXT]),
        "max_slots": st.sampled_from([2, 4, 32]),
        "max_batch_tokens": st.sampled_from([2, 16, 64]),
        "prefix_cache": st.booleans(),
        "max_stall": st.sampled_from([1, 3, 8]),
    }
)


def build(algorithm: tuple[int, str, dict[str, Any]], shape: dict[str, Any]) -> tuple[Cluster, Any]:
    """Workers, and what makes a new runner for one of them; each model is the entry of one route."""
    models, rule, params = algorithm
    page_size = shape["page_size"]

    def runner(name: str) -> LookupRunner:
        pages = -(-shape["tokens"] // page_size)
        return LookupRunner(MODELS[name], num_pages=pages, page_size=page_size, context_length=CONTEXT)

    names = NAMES[:models]
    routes = {
        f"from {name}": Route(
            models=[*names[first:], *names[:first]], algorithm=rule, params=params, max_stall=shape["max_stall"]
        )
        for first, name in enumerate(names)
    }
    cluster = Cluster(
        {name: runner(name) for name in names},
        routes,
        eos_ids=frozenset({EOS}),
        max_batch_tokens=shape["max_batch_tokens"],
        max_slots=shape["max_slots"],
        prefix_cache=shape["prefix_cache"],
    )
    return cluster, runner


def job(cluster: Cluster, dice: random.Random) -> Job:
    prompt = [dice.randrange(1, 24) if dice.random() < 0.3 else 5 for _ in range(dice.randint(1, 16))]
    sampling = {
        "max_tokens": dice.randint(1, CONTEXT - len(prompt)),
        "temperature": dice.choice([0.0, 1.0]),
        "seed": dice.randrange(1 << 64),
        "ignore_eos": dice.random() < 0.7,
    }
    return Job(dice.choice([*cluster.config.routes, *cluster.names]), prompt, sampling)


def composed(entry: LookupModel, peer: LookupModel, ids: list[int]) -> int | None:
    """The token that both models make."""

    def score(ids: Sequence[int]) -> float:
        return DEFER(entry.hidden[entry.row(ids)])

    row = reference.Row(1, peer(ids).tolist(), 0, 0, 0, 0, ids, ())
    return reference.collm(score, 0.0, entry=entry)(row).combined


def check_answer(cluster: Cluster, done: Job) -> None:
    """Every token is the one that its writer draws there; the end is where it must be."""
    answer, sampling = done.answer, Sampling(**done.sampling)
    models = [MODELS[name] for name in cluster.config.all_routes()[done.route].models]
    for index, (token, writer) in enumerate(zip(answer.tokens, answer.writers, strict=True)):
        ids = [*done.prompt, *answer.tokens[:index]]
        possible = {reference.draw(models[writer](ids), sampling, index, [])}
        if cluster.config.all_routes()[done.route].algorithm == "collm" and writer == 1:
            possible.add(composed(models[0], models[1], ids))
        assert token in possible, f"request {done.rid}, output {index}"
    ends = [index for index, token in enumerate(answer.tokens) if token == EOS and not sampling.ignore_eos]
    if done.lost:
        return
    assert answer.finish == ("stop" if ends else "length")
    assert ends in ([], [len(answer.tokens) - 1])
    assert ends or len(answer.tokens) == sampling.max_tokens


async def storm(algorithm: tuple[int, str, dict[str, Any]], shape: dict[str, Any], mood: Mood, seed: int) -> Network:
    dice = random.Random(seed)
    cluster, runner = build(algorithm, shape)
    network = Network(cluster, mood, dice, runner)
    network.start()
    jobs = [job(cluster, dice) for _ in range(dice.randint(4, 24))]
    try:
        await network.storm(jobs, turns=150)
        async with asyncio.timeout(30):
            await network.calm()
    finally:
        note(" ".join(network.events))
        await network.stop()
    for done in network.jobs:
        check_answer(cluster, done)
    for worker in cluster.workers.values():
        worker.kv.check()
        assert worker.kv.counts()["owned"] == 0
        assert worker.scheduler.counts() == {"waiting": 0, "running": 0, "away": 0}
        assert not worker.stream
        assert worker.active.total == 0
    return network


common: dict[str, Any] = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
quick = settings(max_examples=40, derandomize=True, **common)
full = settings(max_examples=4000, **common)
every_storm = given(st.sampled_from(ALGORITHMS), shapes, moods, st.integers(0, 2**32))


LATE_WORD = {
    "page_size": 1,
    "tokens": CONTEXT,
    "max_slots": 2,
    "max_batch_tokens": 2,
    "prefix_cache": False,
    "max_stall": 3,
}
"""A third model tells a stopped worker of a request whose entry then must not forget to tell it of the end."""


@quick
@every_storm
@example(ALGORITHMS[6], LATE_WORD, Mood(full=0.4, stall=0.03, abort=0.02, lag=6), 608331)
def test_storms(algorithm: tuple[int, str, dict[str, Any]], shape: dict[str, Any], mood: Mood, seed: int) -> None:
    asyncio.run(storm(algorithm, shape, mood, seed))


@settings(quick, max_examples=10)
@given(shapes, moods, st.integers(0, 2**32))
def test_storms_over_tokens_that_two_models_make(shape: dict[str, Any], mood: Mood, seed: int) -> None:
    asyncio.run(storm((2, "collm", COMPOSING), shape, mood, seed))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@full
@given(shapes, moods, st.integers(0, 2**32))
def test_storms_over_tokens_that_two_models_make_in_full(shape: dict[str, Any], mood: Mood, seed: int) -> None:
    asyncio.run(storm((2, "collm", COMPOSING), shape, mood, seed))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@full
@every_storm
def test_storms_in_full(
    algorithm: tuple[int, str, dict[str, Any]], shape: dict[str, Any], mood: Mood, seed: int
) -> None:
    asyncio.run(storm(algorithm, shape, mood, seed))
