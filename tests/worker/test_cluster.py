"""Hand-offs between scripted workers: what is written by whom, and that nothing is left behind."""

from __future__ import annotations

import asyncio

import pytest

from ipc.messages import PeerReq
from models.script import ScriptRunner
from tests.harness import Cluster
from trouterd.config import Route

SMALL = [10 + i for i in range(64)]
LARGE = [110 + i for i in range(64)]


def scripted(ids: list[int], **settings: object) -> ScriptRunner:
    return ScriptRunner(ids, vocab_size=258, eos=257, **settings)  # type: ignore[arg-type]


def pair(algorithm: str, **params: object) -> Cluster:
    route = Route(models=["small", "large"], algorithm=algorithm, params=params)
    return Cluster({"small": scripted(SMALL), "large": scripted(LARGE)}, {"demo": route})


async def test_single_model_needs_no_peer() -> None:
    async with pair("none").running() as cluster:
        answer = await cluster.generate("small", [1, 2, 3], max_tokens=5)
        assert answer.tokens == SMALL[:5]
        assert (answer.finish, answer.handoffs) == ("length", 0)
        await cluster.settled()


async def test_end_of_answer_id_is_counted_and_trimmed() -> None:
    async with pair("none").running() as cluster:
        answer = await cluster.generate("large", [1], max_tokens=100)
        assert answer.tokens == [*LARGE, 257]
        assert (answer.finish, answer.trim) == ("stop", 1)
        await cluster.settled()


async def test_visit_writes_every_nth_token_on_the_peer() -> None:
    async with pair("every_n", shape="visit", n=3).running() as cluster:
        answer = await cluster.generate("demo", [1, 2, 3, 4], max_tokens=9)
        assert answer.writers == [0, 0, 1] * 3
        assert answer.tokens == [(LARGE if w else SMALL)[i] for i, w in enumerate(answer.writers)]
        assert answer.finish == "length"
        # The last position was written by the peer, which ended the answer there: two hops, two hops, one.
        assert answer.handoffs == 5
        out = [m for m in cluster.trace if m.source == 0]
        assert [(m.loc, len(m.token_ids) // 4) for m in out] == [(2, 2), (5, 2), (8, 2)]
        back = [m for m in cluster.trace if m.source == 1]
        assert [len(m.token_ids) // 4 for m in back] == [1, 1, 1]
        await cluster.settled()


@pytest.mark.parametrize("models", [2, 3])
async def test_blocks_go_round_with_direct_hops(models: int) -> None:
    names = ["small", "large", "huge"][:models]
    scripts = [[base + i for i in range(64)] for base in (10, 90, 170)]
    route = Route(models=names, algorithm="every_n", params={"shape": "block", "n": 4})
    cluster = Cluster({n: scripted(s) for n, s in zip(names, scripts, strict=False)}, {"demo": route})
    async with cluster.running():
        answer = await cluster.generate("demo", [1, 2, 3, 4], max_tokens=30)
        assert answer.writers == [(t // 4) % models for t in range(30)]
        assert answer.tokens == [scripts[w][t] for t, w in enumerate(answer.writers)]
        if models == 3:
            assert any(m.source == 1 and m.destination == 2 and not m.partial for m in cluster.trace)
        await cluster.settled()


async def test_every_token_by_the_peer() -> None:
    async with pair("bernoulli", p=1.0).running() as cluster:
        answer = await cluster.generate("demo", [1, 2], max_tokens=20)
        assert answer.tokens == LARGE[:20]
        assert answer.writers == [1] * 20
        await cluster.settled()


async def test_many_at_once() -> None:
    async with pair("bernoulli", p=0.3).running() as cluster:
        answers = await asyncio.gather(
            *(cluster.generate("demo", [1, 2, i], max_tokens=40, seed=i) for i in range(100))
        )
        for answer in answers:
            assert answer.tokens == [(LARGE if w else SMALL)[i] for i, w in enumerate(answer.writers)]
        share = sum(sum(a.writers) for a in answers) / 4000
        assert 0.25 < share < 0.35
        await cluster.settled()


async def test_abort_while_pending_reaches_both_and_late_replies_are_dropped() -> None:
    async with pair("every_n", shape="visit", n=2).running() as cluster:
        cluster.hold = lambda source, _, message: isinstance(message, PeerReq) and source == 1
        rid, answer = cluster.submit("demo", [1, 2], max_tokens=20)
        await answer.until(1)
        async with asyncio.timeout(30):
            while not cluster.held:
                await asyncio.sleep(0.001)
        cluster.abort(rid, "demo")
        await cluster.settled()
        cluster.hold = lambda *_: False
        for _source, target, message in cluster.held:
            cluster.deliver(target, message)
        other = await cluster.generate("demo", [1, 2], max_tokens=6)
        assert len(other.tokens) == 6
        assert cluster.workers["small"].stats.stale_messages == 1
        await cluster.settled()
