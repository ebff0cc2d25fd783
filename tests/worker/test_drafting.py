"""Algorithms with drafts against the reference: who writes what, what travels; in crowds, in pieces, in tight pools."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from ipc.messages import Sampling
from models.batch import Batch, StepOutput
from tests.algorithms import reference, reference_drafts
from tests.algorithms.reference import Trace
from tests.algorithms.reference_drafts import DraftTrace
from tests.harness import Cluster
from tests.worker.cousins import cousin
from tests.worker.lookup import LookupModel, LookupRunner
from tests.worker.test_oracle import PROMPT, SAMPLINGS, assert_same, assert_same_handoffs
from trouterd.config import Route

torch.set_num_threads(1)

EOS = 0
LARGE = LookupModel(1)
MODELS = {"small": cousin(LARGE, 7, 0.6), "large": LARGE}
PAIR = list(MODELS)
Loop = Callable[[Sequence[int], Sampling], DraftTrace]


@dataclass(frozen=True)
class Case:
    """An algorithm with parameters, and the same in the reference."""

    algorithm: str
    loop: Loop
    params: dict[str, Any] = field(default_factory=dict)


def rounds(takes: reference_drafts.Takes, gamma: int) -> Loop:
    return lambda prompt, sampling: reference_drafts.rounds(
        [MODELS[name] for name in PAIR], takes, prompt, sampling, (EOS,), gamma
    )


def speculative(gamma: int) -> Case:
    return Case("speculative", rounds(reference_drafts.speculative(), gamma), {"gamma": gamma})


def deferring(rule: str, alpha: float, gamma: int = 4) -> Case:
    params = {"mode": "speculative", "rule": rule, "alpha": alpha, "gamma": gamma}
    return Case("cascade", rounds(reference_drafts.speculative_cascade(rule, alpha), gamma), params)


def judged(passes: reference_drafts.Passes, chunk: int = 0, **params: Any) -> Case:
    mode = {"mode": "chunk", "chunk": chunk} if chunk else {"mode": "sequence"}
    return Case(
        "cascade",
        lambda prompt, sampling: reference_drafts.cascade(
            [MODELS[name] for name in PAIR], passes, prompt, sampling, (EOS,), chunk
        ),
        mode | params,
    )


CASES = {
    "gamma 1": speculative(1),
    "gamma 4": speculative(4),
    "gamma 9": speculative(9),
    "chow": deferring("chow", 0.4),
    "chow, all": deferring("chow", -1, 3),
    "diff": deferring("diff", 0.1),
    "diff, none": deferring("diff", 1, 5),
    "sequence": judged(reference_drafts.mean(-1.0), threshold=-1.0),
    "sequence, never": judged(reference_drafts.mean(0.0), threshold=0.0),
    "sequence, quantile": judged(
        reference_drafts.quantile(-3.5, 0.1), threshold=-3.5, measure="quantile", quantile=0.1
    ),
    "chunk 4": judged(reference_drafts.mean(-0.6), 4, threshold=-0.6),
    "chunk 5, least": judged(reference_drafts.quantile(-1.5, 0.0), 5, threshold=-1.5, measure="quantile", quantile=0.0),
    "chunk 1": judged(reference_drafts.mean(-0.3), 1, threshold=-0.3),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
every_sampling = pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())


def cluster(routes: dict[str, Route] | Case, *, page_size: int = 4, **settings: Any) -> Cluster:
    """Workers of both models."""
    if isinstance(routes, Case):
        routes = {"demo": Route(models=PAIR, algorithm=routes.algorithm, params=routes.params)}
    runners = {name: LookupRunner(model, page_size=page_size) for name, model in MODELS.items()}
    return Cluster(runners, routes, eos_ids=frozenset({EOS}), **settings)


def expected(case: Case, prompt: Sequence[int], sampling: dict[str, Any]) -> DraftTrace:
    """What the reference writes."""
    return case.loop(prompt, Sampling(**({"seed": 0, "max_tokens": 32, "temperature": 0.0} | sampling)))


def by_large(prompt: Sequence[int], sampling: dict[str, Any], model: LookupModel = LARGE) -> Trace:
    """What the large model, or another one, writes alone."""
    values = {"seed": 0, "max_tokens": 32, "temperature": 0.0} | sampling
    return reference.generate([model], reference.none(), prompt, Sampling(**values), (EOS,))


@every_sampling
@every_case
async def test_one_request(case: Case, sampling: dict[str, Any]) -> None:
    sampling = {"max_tokens": 40} | sampling
    async with cluster(case).running() as workers:
        rid, answer = workers.submit("demo", PROMPT, **sampling)
        await answer.done.wait()
        await workers.settled()
    trace = expected(case, PROMPT, sampling)
    assert_same(answer, trace)
    assert_same_handoffs(workers.trace, rid, trace)
    assert answer.handoffs == len(trace.handoffs)
    assert (answer.drafted, answer.accepted) == (trace.drafted, trace.accepted)
    if case.algorithm == "speculative":
        assert answer.tokens == by_large(PROMPT, sampling).tokens
        # One row for each draft, and the prompt with the first one; one extend for each visit, and the prompt ahead of them.
        assert answer.forwards[0] == trace.drafted
        assert answer.forwards[1] in (trace.visits, trace.visits + 1)


@pytest.mark.parametrize("settings", [{}, {"max_batch_tokens": 3}, {"page_size": 3, "prefix_cache": False}])
async def test_a_crowd_of_all_kinds_in_the_same_batches(settings: dict[str, Any]) -> None:
    """Ordinary routes among them; steps of 3 rows read drafts in pieces."""
    routes = {name: Route(models=PAIR, algorithm=case.algorithm, params=case.params) for name, case in CASES.items()}
    routes["entropy"] = Route(models=PAIR, algorithm="entropy", params={"threshold": 0.45})
    dice = random.Random(3)
    jobs = [
        (
            dice.choice([*routes, "gamma 4", "gamma 9", "large"]),
            PROMPT[: dice.randint(1, 7)] + [dice.randrange(3)] * dice.randint(0, 9),
            {"temperature": dice.choice([0.0, 1.0]), "seed": n, "max_tokens": dice.randint(1, 40)},
        )
        for n in range(40)
    ]
    async with cluster(routes, **settings).running() as workers:
        pairs = [workers.submit(route, prompt, **sampling) for route, prompt, sampling in jobs]
        await asyncio.gather(*(answer.done.wait() for _, answer in pairs))
        await workers.settled()
    for (route, prompt, sampling), (_, answer) in zip(jobs, pairs, strict=True):
        if route == "large":
            trace = by_large(prompt, sampling)
        elif route == "entropy":
            values = Sampling(**sampling)
            trace = reference.generate(list(MODELS.values()), reference.entropy(0.45), prompt, values, (EOS,))
        else:
            trace = expected(CASES[route], prompt, sampling)
        assert_same(answer, trace)


@pytest.mark.parametrize("name", ["gamma 4", "diff", "chunk 4"])
async def test_pools_that_are_too_small_for_all(name: str) -> None:
    """Preemption while drafting and while being verified, visitors that lose their KV, refusals: nothing changes the answer."""
    case = CASES[name]
    sampling = {"temperature": 1.0, "max_tokens": 30, "ignore_eos": True}
    async with cluster(case, num_pages=40, max_batch_tokens=32).running() as workers:
        pairs = [workers.submit("demo", [n, *PROMPT], seed=n, **sampling) for n in range(12)]
        await asyncio.gather(*(answer.done.wait() for _, answer in pairs))
        await workers.settled()
        squeezed = sum(w.scheduler.preemptions + w.scheduler.evictions for w in workers.workers.values())
    assert squeezed > 0
    for n, (_, answer) in enumerate(pairs):
        assert_same(answer, expected(case, [n, *PROMPT], sampling | {"seed": n}))


async def test_pools_that_are_full_of_requests_for_each_other() -> None:
    """Both models verify for the other one: those that are refused give their own pages up and try again."""
    routes = {
        "demo": Route(models=PAIR, algorithm="speculative", params={"gamma": 5}),
        "back": Route(models=PAIR[::-1], algorithm="speculative", params={"gamma": 5}),
    }
    sampling = {"max_tokens": 30, "ignore_eos": True}
    async with cluster(routes, num_pages=16, max_batch_tokens=64).running() as workers:
        async with asyncio.timeout(30):
            pairs = [workers.submit(route, [i] * 20, **sampling)[1] for i in range(4) for route in routes]
            await asyncio.gather(*(answer.done.wait() for answer in pairs))
        await workers.settled()
        assert sum(w.stats.refusals for w in workers.workers.values()) > 0
        assert sum(w.stats.fallbacks for w in workers.workers.values()) == 0
    for number, answer in enumerate(pairs):
        prompt = [number // 2] * 20
        model = MODELS["small" if number % 2 else "large"]
        values = Sampling(seed=0, temperature=0.0, **sampling)
        assert answer.tokens == reference.generate([model], reference.none(), prompt, values).tokens


async def test_gamma_is_live_and_per_request() -> None:
    async with cluster(speculative(4)).running() as workers:
        pairs = [
            workers.submit("demo", PROMPT, {"gamma": float(gamma)}, max_tokens=30, ignore_eos=True)
            for gamma in (1, 2, 6)
        ]
        await asyncio.gather(*(answer.done.wait() for _, answer in pairs))
        for gamma, (rid, answer) in zip((1, 2, 6), pairs, strict=True):
            trace = expected(speculative(gamma), PROMPT, {"max_tokens": 30, "ignore_eos": True})
            assert_same(answer, trace)
            assert_same_handoffs(workers.trace, rid, trace)
        for name in PAIR:
            workers.workers[name].configure("demo", Route(models=PAIR, algorithm="speculative", params={"gamma": 2}))
        again = await workers.generate("demo", PROMPT, max_tokens=30, ignore_eos=True)
        assert (again.tokens, again.handoffs) == (pairs[1][1].tokens, pairs[1][1].handoffs)


@pytest.mark.parametrize("max_stall", [1, 2])
@pytest.mark.parametrize("name", ["gamma 4", "chow", "chunk 4"])
async def test_max_stall_changes_nothing_where_every_round_makes_progress(name: str, max_stall: int) -> None:
    case = CASES[name]
    route = Route(models=PAIR, algorithm=case.algorithm, params=case.params, max_stall=max_stall)
    sampling = {"max_tokens": 40, "temperature": 1.0, "seed": 3}
    async with cluster({"demo": route}).running() as workers:
        answer = await workers.generate("demo", PROMPT, **sampling)
        await workers.settled()
    trace = expected(case, PROMPT, sampling)
    assert trace.visits > 1
    assert_same(answer, trace)
    assert (answer.drafted, answer.accepted) == (trace.drafted, trace.accepted)


async def test_nothing_provisional_is_streamed() -> None:
    case = judged(reference_drafts.mean(0.0), threshold=0.0)
    async with cluster(case).running() as workers:
        workers.accept = lambda _, target, message: not (target == 1 and hasattr(message, "handoff_seq"))
        rid, answer = workers.submit("demo", PROMPT, max_tokens=12, ignore_eos=True)
        small = workers.workers["small"]
        async with asyncio.timeout(30):
            while small.stats.drafted != 12:
                await asyncio.sleep(0)
        assert small.requests[rid].output_length == 0
        assert answer.tokens == []
        workers.accept = lambda *_: True
        await answer.done.wait()
        assert_same(answer, expected(case, PROMPT, {"max_tokens": 12, "ignore_eos": True}))
        await workers.settled()


async def test_steps_want_no_more_logits_than_without_drafts() -> None:
    """Drafts that a step has no logits left for are verified in the next one."""
    workers = cluster(speculative(9), max_slots=40)
    runner = workers.workers["large"].stepper.runner
    step, wanted = runner.step, [0]

    def counting(batch: Batch) -> StepOutput:
        wanted.append(len(batch.logit_rows))
        return step(batch)

    runner.step = counting  # type: ignore[method-assign]
    sampling = {"max_tokens": 30, "ignore_eos": True, "temperature": 1.0}
    async with workers.running():
        pairs = [workers.submit("demo", [*PROMPT, n], seed=n, **sampling) for n in range(36)]
        await asyncio.gather(*(answer.done.wait() for _, answer in pairs))
        await workers.settled()
    assert max(wanted) == 64
    for n, (_, answer) in enumerate(pairs):
        assert answer.tokens == by_large([*PROMPT, n], sampling | {"seed": n}).tokens


def test_the_cases_reach_what_they_are_for() -> None:
    """Drafts are accepted and refused, answers end inside and behind them, cascades go both ways."""
    traces = {
        name: [expected(case, PROMPT, {"max_tokens": 40} | s) for s in SAMPLINGS.values()]
        for name, case in CASES.items()
    }
    for name in ("gamma 4", "gamma 9", "chow", "diff"):
        drafted, accepted = (sum(getattr(t, what) for t in traces[name]) for what in ("drafted", "accepted"))
        assert 0.2 * drafted < accepted < drafted
    for name in ("sequence", "sequence, quantile", "chunk 4", "chunk 5, least", "chunk 1"):
        assert {0, 1} == {writer for trace in traces[name] for writer in trace.writers}
    ends = {(t.finish, t.writers[-1]) for ts in traces.values() for t in ts}
    assert {("stop", 0), ("stop", 1), ("length", 0), ("length", 1)} <= ends
    assert traces["chow, all"][0].tokens == traces["gamma 4"][0].tokens
    assert traces["diff, none"][0].accepted == traces["diff, none"][0].drafted
