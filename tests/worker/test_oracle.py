"""Workers against the reference loop: ids, writers, hand-over positions, suffixes; alone and in a crowd."""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from ipc.messages import PeerReq, Sampling
from models.rng import Purpose, uniform
from tests.algorithms import reference
from tests.algorithms.heads import Score, confidence_net, write_confidence, write_defer
from tests.algorithms.reference import First, Rule, Trace
from tests.harness import Answer, Cluster
from tests.worker.lookup import HIDDEN, LookupModel, LookupRunner
from trouterd.config import Route

torch.set_num_threads(1)

EOS = 0
NAMES = ("small", "large", "huge")
MODELS = {name: LookupModel(seed) for seed, name in enumerate(NAMES)}
PROMPT = [5, 9, 2, 41, 17, 8, 3]


FILES = tempfile.TemporaryDirectory()
"""Trained heads for the small model; gone when the tests end."""
TRUST, DEFER = (str(Path(FILES.name, name)) for name in ("trust.pth", "defer.safetensors"))


def of_small(head: Score) -> reference.Score:
    """A head over the small model's hidden states."""
    small = MODELS["small"]
    return lambda ids: head(small.hidden[small.row(ids)])


confidence = of_small(write_confidence(Path(TRUST), confidence_net(HIDDEN)))
deferral = of_small(write_defer(Path(DEFER), HIDDEN, bias=-0.5))


@dataclass(frozen=True)
class Case:
    """An algorithm with parameters, and the same rule in the reference."""

    algorithm: str
    rule: Rule
    params: dict[str, Any] = field(default_factory=dict)
    models: int = 2
    first: First = lambda *_: 0
    score: float | None = None
    """Of every prompt."""

    def route(self, **settings: Any) -> Route:
        """The route over the first models."""
        names = list(NAMES[: self.models])
        return Route(models=names, algorithm=self.algorithm, params=self.params, **settings)


def ensemble(*weights: float, mode: str = "draw") -> Case:
    """A case of `me`."""
    first = reference.first_drawn(weights) if mode == "draw" else lambda *_: reference.proportioned(0, weights)
    params = {"weights": list(weights), "mode": mode}
    return Case("me", reference.me(weights, mode), params, len(weights), first)


def query(source: str, threshold: float, score: float | None = None) -> Case:
    """A case of `query`."""
    first = reference.first_of_query(source, threshold, score)
    return Case("query", reference.stay(), {"source": source, "threshold": threshold}, first=first, score=score)


CASES = {
    "none": Case("none", reference.none()),
    "none of one": Case("none", reference.none(), models=1),
    "entropy": Case("entropy", reference.entropy(0.45), {"threshold": 0.45}),
    "entropy, all": Case("entropy", reference.entropy(0), {"threshold": 0}),
    "entropy, nothing": Case("entropy", reference.entropy(99), {"threshold": 99}),
    "entropy, back when sure": Case(
        "entropy", reference.entropy(1.2, back="confident"), {"threshold": 1.2, "back": "confident"}
    ),
    "entropy, normalized": Case(
        "entropy",
        reference.entropy(0.3, "normalized_entropy"),
        {"threshold": 0.3, "measure": "normalized_entropy"},
    ),
    "entropy, confidence": Case(
        "entropy", reference.entropy(0.6, "confidence"), {"threshold": 0.6, "measure": "confidence"}
    ),
    "entropy, margin": Case(
        "entropy",
        reference.entropy(0.2, "margin", "confident"),
        {"threshold": 0.2, "measure": "margin", "back": "confident"},
    ),
    "rstitch": Case("rstitch", reference.rstitch(0.2), {"tau": 0.2}),
    "rstitch, small alone": Case("rstitch", reference.rstitch(1), {"tau": 1}),
    "rstitch, large for ever": Case("rstitch", reference.rstitch(-0.5), {"tau": -0.5}),
    "rstitch, vocab": Case("rstitch", reference.rstitch(0.1, 4096), {"tau": 0.1, "vocab": 4096}),
    "entropy, hysteresis": Case(
        "entropy",
        reference.entropy(1.2, back="confident", threshold_back=0.3),
        {"threshold": 1.2, "back": "confident", "threshold_back": 0.3},
    ),
    "entropy, log-U": Case(
        "entropy",
        reference.entropy(1.6, "aleatoric", epistemic=0.3),
        {"threshold": 1.6, "measure": "aleatoric", "epistemic": 0.3},
    ),
    "rstitch, gated": Case(
        "rstitch",
        reference.rstitch(0.05, 0, confidence, 0.6),
        {"tau": 0.05, "checkpoint": TRUST, "threshold": 0.6},
    ),
    "citer": Case("citer", reference.citer(confidence, 0.4), {"checkpoint": TRUST, "threshold": 0.4}),
    "collm": Case("collm", reference.collm(deferral, 0.5), {"checkpoint": DEFER, "threshold": 0.5}),
    "collm, cosine": Case(
        "collm",
        reference.collm(deferral, 0.3, "cosine", 20),
        {"checkpoint": DEFER, "threshold": 0.3, "schedule": "cosine", "warmup": 20},
    ),
    "visit 1": Case("every_n", reference.every_n("visit", 1), {"shape": "visit", "n": 1}),
    "visit 5": Case("every_n", reference.every_n("visit", 5), {"shape": "visit", "n": 5}),
    "visit 5 by seed": Case(
        "every_n", reference.every_n("visit", 5, by_seed=True), {"shape": "visit", "n": 5, "phases": "seed"}
    ),
    "block 3 of 3 by seed": Case(
        "every_n", reference.every_n("block", 3, 3, by_seed=True), {"shape": "block", "n": 3, "phases": "seed"}, 3
    ),
    "block 1 of 2": Case("every_n", reference.every_n("block", 1), {"shape": "block", "n": 1}),
    "block 4 of 2": Case("every_n", reference.every_n("block", 4), {"shape": "block", "n": 4}),
    "block 1 of 3": Case("every_n", reference.every_n("block", 1, 3), {"shape": "block", "n": 1}, 3),
    "block 3 of 3": Case("every_n", reference.every_n("block", 3, 3), {"shape": "block", "n": 3}, 3),
    "bernoulli": Case("bernoulli", reference.bernoulli(0.35), {"p": 0.35}),
    "bernoulli, never": Case("bernoulli", reference.bernoulli(0), {"p": 0}),
    "bernoulli, always": Case("bernoulli", reference.bernoulli(1), {"p": 1}),
    "me of 3": ensemble(0.5, 0.3, 0.2),
    "me, mostly others": ensemble(0, 9, 1),
    "me, proportions": ensemble(0.2, 0.5, 0.3, mode="proportions"),
    "query, strong": query("field", 0.7, 0.7),
    "query, random": query("random", 0.5),
    "query, hidden": Case(
        "query",
        reference.query_hidden(confidence, 0.5),
        {"source": "hidden", "checkpoint": TRUST, "threshold": 0.5},
    ),
}
COMPOSED = {
    f"collm, composed above {threshold}": Case(
        "collm",
        reference.collm(deferral, threshold, entry=MODELS["small"]),
        {"checkpoint": DEFER, "threshold": threshold, "mode": "compose"},
    )
    for threshold in (0.0, 0.4)
}
"""Tokens that no model drew: these do not write what one model would."""
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
with_composed = pytest.mark.parametrize("case", (CASES | COMPOSED).values(), ids=(CASES | COMPOSED).keys())

SAMPLINGS = {
    "greedy": {"temperature": 0.0, "ignore_eos": True},
    "seeded": {"temperature": 0.8, "top_p": 0.95, "top_k": 20, "seed": 2**64 - 59},
    "min_tokens": {"temperature": 1.5, "seed": 11, "choice": 3, "min_tokens": 25, "stop_token_ids": (7, 30)},
    "stop ids": {"temperature": 1.0, "min_p": 0.02, "seed": 4, "stop_token_ids": (1, 2, 3), "ignore_eos": True},
}
every_sampling = pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())


def cluster(route: Route, models: dict[str, LookupModel] = MODELS, **settings: Any) -> Cluster:
    """Workers of lookup models behind one route named "demo"."""
    runner = {"page_size": settings.pop("page_size", 4)}
    runners = {name: LookupRunner(models[name], **runner) for name in route.models}
    return Cluster(runners, {"demo": route}, eos_ids=frozenset({EOS}), **settings)


def expected(case: Case, prompt: Sequence[int], sampling: dict[str, Any], max_stall: int = 8) -> Trace:
    """What the reference writes."""
    values = {"seed": 0, "max_tokens": 40} | sampling
    models = [MODELS[name] for name in NAMES[: case.models]]
    return reference.generate(models, case.rule, prompt, Sampling(**values), (EOS,), max_stall, case.first)


def assert_same(answer: Answer, trace: Trace) -> None:
    """Ids, writers and end of an answer."""
    assert answer.tokens == trace.tokens
    assert answer.writers == trace.writers
    assert answer.finish == trace.finish
    assert answer.trim == (trace.finish == "stop")


def handoffs(sent: Sequence[PeerReq], rid: int) -> list[tuple[int, int, int, int]]:
    """(source, destination, ids in the suffix, loc) of a request's hand-offs, in order."""
    own = [m for m in sent if m.rid == rid and not m.partial and not m.finish]
    own.sort(key=lambda m: m.handoff_seq)
    return [(m.source, m.destination, len(m.token_ids) // 4, m.loc) for m in own]


def assert_same_handoffs(sent: Sequence[PeerReq], rid: int, trace: Trace) -> None:
    """Every hand-off went where, with what, and from which position on."""
    assert handoffs(sent, rid) == [(h.source, h.destination, h.suffix, h.loc) for h in trace.handoffs]


@every_sampling
@with_composed
async def test_one_request(case: Case, sampling: dict[str, Any]) -> None:
    async with cluster(case.route()).running() as workers:
        rid, answer = workers.submit("demo", PROMPT, score=case.score, **({"max_tokens": 40} | sampling))
        await answer.done.wait()
        await workers.settled()
    trace = expected(case, PROMPT, sampling)
    assert_same(answer, trace)
    assert_same_handoffs(workers.trace, rid, trace)
    assert answer.handoffs == len(trace.handoffs)


@with_composed
async def test_a_crowd_with_shared_prefixes(case: Case) -> None:
    requests = [
        (
            PROMPT[: n % 5 + 1] + [n % 3] * (n % 11),
            {"max_tokens": 5 + 3 * (n % 9), "temperature": 0.5 * (n % 3), "seed": n},
        )
        for n in range(16)
    ]
    async with cluster(case.route(), max_batch_tokens=16).running() as workers:
        pairs = [workers.submit("demo", prompt, score=case.score, **sampling) for prompt, sampling in requests]
        await asyncio.gather(*(answer.done.wait() for _, answer in pairs))
        await workers.settled()
    for (prompt, sampling), (rid, answer) in zip(requests, pairs, strict=True):
        trace = expected(case, prompt, sampling)
        assert_same(answer, trace)
        assert_same_handoffs(workers.trace, rid, trace)


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("name", ["entropy", "rstitch", "block 3 of 3", "me of 3", "query, strong"])
async def test_page_sizes_and_prefix_cache(name: str, prefix_cache: bool, page_size: int) -> None:
    case = CASES[name]
    prompt = PROMPT * 6
    settings = {"prefix_cache": prefix_cache, "page_size": page_size, "max_batch_tokens": 16}
    async with cluster(case.route(), **settings).running() as workers:
        for _ in range(2):
            rid, answer = workers.submit("demo", prompt, score=case.score, max_tokens=30, temperature=0.7)
            await answer.done.wait()
            trace = expected(case, prompt, {"max_tokens": 30, "temperature": 0.7})
            assert_same(answer, trace)
            assert_same_handoffs(workers.trace, rid, trace)
        await workers.settled()


@pytest.mark.parametrize("max_stall", [1, 2, 8])
async def test_max_stall_changes_nothing_where_every_hand_off_makes_progress(max_stall: int) -> None:
    case = CASES["visit 1"]
    async with cluster(case.route(max_stall=max_stall)).running() as workers:
        rid, answer = workers.submit("demo", PROMPT, max_tokens=12)
        await answer.done.wait()
    trace = expected(case, PROMPT, {"max_tokens": 12, "temperature": 0.0}, max_stall)
    assert_same(answer, trace)
    assert_same_handoffs(workers.trace, rid, trace)


def wander(keep: Sequence[bool], restless: float) -> Rule:
    """The rule of tests/algorithms/wander.py, in terms of route indices."""
    limit = reference.single(restless)

    def rule(row: reference.Row) -> reference.Decision:
        draw = uniform(row.seed, row.choice, row.index, Purpose.USER + row.model)
        others = [model for model in range(len(keep)) if model != row.model]
        writer = others[int(draw / limit * len(others))] if draw < limit else row.model
        return reference.Decision(writer, keep[row.model])

    return rule


@pytest.mark.parametrize("max_stall", [1, 3, 8])
@pytest.mark.parametrize("keep", [(False, False), (False, True, False), (True, False, False), (False, False, False)])
@pytest.mark.parametrize("file", ["wander.py", "wander_tensor.py"])
async def test_any_model_to_any_other(file: str, keep: tuple[bool, ...], max_stall: int) -> None:
    path = Path(reference.__file__).with_name(file)
    params = {"keep": list(keep), "restless": 0.7}
    case = Case(str(path), wander(keep, 0.7), params, len(keep))
    sampling = {"temperature": 1.0, "max_tokens": 40, "ignore_eos": True}
    async with cluster(case.route(max_stall=max_stall)).running() as workers:
        pairs = [workers.submit("demo", [*PROMPT, n], seed=n, **sampling) for n in range(8)]
        await asyncio.gather(*(answer.done.wait() for _, answer in pairs))
        await workers.settled()
    longest = 0
    for n, (rid, answer) in enumerate(pairs):
        trace = expected(case, [*PROMPT, n], sampling | {"seed": n}, max_stall)
        assert_same(answer, trace)
        assert_same_handoffs(workers.trace, rid, trace)
        longest = max(longest, *Counter(handoff.loc for handoff in trace.handoffs).values())
    assert longest == max_stall


async def test_overrides_of_requests_in_one_batch() -> None:
    taus = [-1.0, 0.0, 0.1, 0.3, 1.0]
    async with cluster(CASES["rstitch"].route()).running() as workers:
        pairs = [
            workers.submit("demo", PROMPT, {"tau": tau}, max_tokens=30, temperature=1.0, ignore_eos=True)
            for tau in taus
        ]
        await asyncio.gather(*(answer.done.wait() for _, answer in pairs))
    shares = []
    for tau, (rid, answer) in zip(taus, pairs, strict=True):
        case = Case("rstitch", reference.rstitch(tau))
        trace = expected(case, PROMPT, {"max_tokens": 30, "temperature": 1.0, "ignore_eos": True})
        assert_same(answer, trace)
        assert_same_handoffs(workers.trace, rid, trace)
        shares.append(sum(answer.writers))
    assert shares[0] == 30
    assert shares[-1] == 0
    assert len(set(shares)) > 2


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("others", [0, 31])
@every_case
async def test_copies_of_one_model_write_what_it_writes_alone(case: Case, others: int, prefix_cache: bool) -> None:
    sampling = {"temperature": 0.9, "seed": 5, "max_tokens": 32}
    copies = dict.fromkeys(NAMES, MODELS["small"])
    alone = expected(Case("none", reference.none(), models=1), PROMPT, sampling)
    async with cluster(case.route(), copies, prefix_cache=prefix_cache, max_batch_tokens=64).running() as workers:
        crowd = [
            workers.submit("demo", [n, *PROMPT[: n % 6]], score=case.score, seed=n, temperature=1.0)
            for n in range(others)
        ]
        answer = await workers.generate("demo", PROMPT, score=case.score, **sampling)
        await asyncio.gather(*(other.done.wait() for _, other in crowd))
        await workers.settled()
    assert answer.tokens == alone.tokens
    assert answer.finish == alone.finish


@pytest.mark.parametrize(
    "name", ["entropy", "rstitch", "visit 1", "block 3 of 3", "bernoulli", "me of 3", "query, random"]
)
async def test_copies_of_one_model_in_a_pool_that_is_too_small_for_all(name: str) -> None:
    case = CASES[name]
    copies = dict.fromkeys(NAMES, MODELS["small"])
    alone = Case("none", reference.none(), models=1)
    sampling = {"temperature": 1.0, "max_tokens": 40, "ignore_eos": True}
    async with cluster(case.route(), copies, num_pages=40, max_batch_tokens=32).running() as workers:
        pairs = [workers.submit("demo", [n, *PROMPT], seed=n, **sampling) for n in range(12)]
        await asyncio.gather(*(answer.done.wait() for _, answer in pairs))
        await workers.settled()
        squeezed = sum(w.scheduler.preemptions + w.scheduler.evictions for w in workers.workers.values())
    assert squeezed > 0
    for n, (_, answer) in enumerate(pairs):
        assert answer.tokens == expected(alone, [n, *PROMPT], sampling | {"seed": n}).tokens


def test_the_cases_reach_what_they_are_for() -> None:
    """The models are such that algorithms differ, both sides end answers, and peers write runs."""
    traces = {name: [expected(case, PROMPT, s) for s in SAMPLINGS.values()] for name, case in CASES.items()}
    assert len({tuple(t[0].tokens) for t in traces.values()}) > 12
    endings = {(t.finish, t.writers[-1]) for ts in traces.values() for t in ts}
    assert {("stop", 0), ("stop", 1), ("length", 0), ("length", 1)} <= endings
    composed = [expected(case, PROMPT, s) for case in COMPOSED.values() for s in SAMPLINGS.values()]
    assert {("stop", 1), ("length", 1)} <= {(t.finish, t.writers[-1]) for t in composed}
    runs = traces["rstitch"][0].writers
    assert any(runs[n : n + 3] == [1, 1, 1] for n in range(len(runs)))
