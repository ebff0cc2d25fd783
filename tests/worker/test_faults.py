"""Lost peers, refused and repeated hand-offs, failing steps and tight pools: nothing hangs, nothing is written twice."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from ipc.messages import Message, Nack, NackReason, PeerReq
from models.script import ScriptRunner
from tests.harness import Answer, Cluster
from trouterd.config import Route
from trouterd.worker.events import ProcessState
from trouterd.worker.outbound import API

SMALL = [10 + i for i in range(64)]
LARGE = [110 + i for i in range(64)]
SMALL_INDEX, LARGE_INDEX = 0, 1


def pair(
    algorithm: str,
    *,
    small: dict[str, Any] | None = None,
    large: dict[str, Any] | None = None,
    route: dict[str, Any] | None = None,
    cluster: dict[str, Any] | None = None,
    **params: object,
) -> Cluster:
    runners = {
        "small": ScriptRunner(SMALL, vocab_size=258, eos=257, **(small or {})),
        "large": ScriptRunner(LARGE, vocab_size=258, eos=257, **(large or {})),
    }
    demo = Route(models=["small", "large"], algorithm=algorithm, params=params, **(route or {}))
    back = Route(models=["large", "small"], algorithm=algorithm, params=params)
    return Cluster(runners, {"demo": demo, "back": back}, **(cluster or {}))


def check_writers(answer: Answer, scripts: tuple[list[int], list[int]] = (SMALL, LARGE)) -> None:
    """Every token is the one that its writer's script has at that index."""
    assert answer.tokens == [scripts[w][t] for t, w in enumerate(answer.writers)]


def handoffs_from(source: int) -> Callable[[int, int, Message], bool]:
    return lambda s, _, message: s == source and isinstance(message, PeerReq)


async def eventually(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("state", ["down", "stalled"])
async def test_lost_peer_falls_back_to_the_entry(state: str) -> None:
    async with pair("every_n", shape="visit", n=2).running() as cluster:
        cluster.hold = handoffs_from(LARGE_INDEX)
        _, answer = cluster.submit("demo", [1, 2], max_tokens=8)
        await eventually(lambda: cluster.held)
        small = cluster.workers["small"]
        small.deliver(ProcessState(LARGE_INDEX, state))
        await answer.done.wait()
        # The dropped sample of the lost hand-off is committed, and the rest stays with the entry.
        assert answer.tokens == SMALL[:8]
        assert answer.writers == [0] * 8
        # What the peer sends after it was given up is stale.
        cluster.hold = lambda *_: False
        small.deliver(ProcessState(LARGE_INDEX, "up"))
        for _source, target, message in cluster.held:
            cluster.deliver(target, message)
        again = await cluster.generate("demo", [1, 2], max_tokens=8)
        assert again.writers == [0, 1] * 4
        check_writers(again)
        assert small.stats.stale_messages == 1
        await cluster.settled()


async def test_stalled_peer_comes_back_in_the_middle_of_a_request() -> None:
    async with pair("every_n", shape="visit", n=2, small={"delay_ms": 1}).running() as cluster:
        cluster.hold = handoffs_from(LARGE_INDEX)
        _, answer = cluster.submit("demo", [1, 2], max_tokens=40)
        await eventually(lambda: cluster.held)
        cluster.workers["small"].deliver(ProcessState(LARGE_INDEX, "stalled"))
        await answer.until(4)
        cluster.hold = lambda *_: False
        for _source, target, message in cluster.held:
            cluster.deliver(target, message)
        cluster.workers["small"].deliver(ProcessState(LARGE_INDEX, "up"))
        await answer.done.wait()
        check_writers(answer)
        assert answer.writers[1] == 0
        assert sum(answer.writers[5:]) >= 10
        assert len(answer.tokens) == 40
        await cluster.settled()


async def test_policy_fail_ends_the_request_with_an_error() -> None:
    async with pair("every_n", shape="visit", n=2, route={"on_peer_loss": "fail"}).running() as cluster:
        cluster.hold = handoffs_from(LARGE_INDEX)
        _, answer = cluster.submit("demo", [1, 2], max_tokens=8)
        await eventually(lambda: cluster.held)
        cluster.workers["small"].deliver(ProcessState(LARGE_INDEX, "down"))
        await answer.done.wait()
        assert answer.finish == "error"
        assert "on_peer_loss" in answer.error
        assert cluster.workers["small"].idle.is_set()


@pytest.mark.parametrize("policy", ["fallback", "fail"])
@pytest.mark.parametrize("refused", ["ring", "room"])
async def test_policy_for_a_direct_hop_that_is_refused(policy: str, refused: str) -> None:
    """The second of three models cannot hand on to the third one: it writes on, or nobody does."""
    names = ["small", "medium", "large"]
    pages = {"num_pages": 4, "page_size": 1} if refused == "room" else {}
    runners = {
        name: ScriptRunner(SMALL, vocab_size=258, eos=257, **(pages if name == "large" else {})) for name in names
    }
    route = Route(models=names, algorithm="every_n", params={"shape": "block", "n": 2}, on_peer_loss=policy)
    async with Cluster(runners, {"demo": route}).running() as cluster:
        if refused == "ring":
            cluster.accept = lambda source, target, message: (
                (source, target) != (1, 2) or not isinstance(message, PeerReq)
            )
        answer = await cluster.generate("demo", [1] * 8, max_tokens=12)
        if policy == "fail":
            assert (answer.finish, answer.writers) == ("error", [0, 0, 1, 1])
            assert "on_peer_loss" in answer.error
        else:
            assert answer.finish == "length"
            assert answer.writers[:5] == [0, 0, 1, 1, 1]
        assert answer.tokens == SMALL[: len(answer.tokens)]
        await cluster.settled()


@pytest.mark.parametrize("policy", ["fallback", "fail"])
async def test_policy_for_a_visit_that_runs_out_of_room(policy: str) -> None:
    """The peer has written a part of its block when no page is left."""
    route = {"on_peer_loss": policy}
    large = {"num_pages": 14, "page_size": 1}
    async with pair("every_n", shape="block", n=8, route=route, large=large).running() as cluster:
        answer = await cluster.generate("demo", [1] * 4, max_tokens=24)
        written = sum(answer.writers)
        assert 0 < written < 8
        assert answer.writers[: 8 + written] == [0] * 8 + [1] * written
        assert (answer.finish, len(answer.tokens)) == (("error", 8 + written) if policy == "fail" else ("length", 24))
        check_writers(answer)
        await cluster.settled()


async def test_dead_entry_takes_its_requests_out_of_the_peers() -> None:
    async with pair("every_n", shape="visit", n=2, large={"delay_ms": 20}).running() as cluster:
        cluster.submit("demo", [1, 2], max_tokens=8)
        large = cluster.workers["large"]
        await eventually(lambda: large.requests)
        large.deliver(ProcessState(SMALL_INDEX, "down"))
        await eventually(large.idle.is_set)
        large.kv.check()
        assert large.kv.counts()["owned"] == 0


async def test_dead_api_ends_everything() -> None:
    async with pair("every_n", shape="visit", n=2, small={"delay_ms": 1}).running() as cluster:
        for i in range(5):
            cluster.submit("demo", [1, 2, i], max_tokens=60)
        await eventually(lambda: len(cluster.workers["small"].requests) == 5)
        cluster.workers["small"].deliver(ProcessState(API, "down"))
        await cluster.settled()


async def test_restarted_peer_asks_for_everything_again() -> None:
    """A hand-off to a peer that does not know the request is answered STALE and repeated with prompt and output."""
    async with pair("every_n", shape="visit", n=4).running() as cluster:
        large = cluster.workers["large"]
        cluster.hold = lambda s, t, m: (
            t == LARGE_INDEX and not isinstance(m, PeerReq)
        )  # the peer never hears of the prompt
        answer = await cluster.generate("demo", [1, 2, 3], max_tokens=12)
        assert answer.writers == [0, 0, 0, 1] * 3
        check_writers(answer)
        assert large.stats.nacks_sent == 1
        full = [m for m in cluster.trace if m.submit is not None]
        assert [(m.start, m.loc, len(m.token_ids) // 4) for m in full] == [(0, 3, 3)]
        cluster.hold = lambda *_: False
        for _source, target, message in cluster.held:
            cluster.deliver(target, message)
        await cluster.settled()


async def test_full_ring_keeps_the_request_here() -> None:
    async with pair("every_n", shape="visit", n=2).running() as cluster:
        cluster.accept = lambda _, target, message: not (target == LARGE_INDEX and isinstance(message, PeerReq))
        answer = await cluster.generate("demo", [1, 2], max_tokens=8)
        assert answer.tokens == SMALL[:8]
        assert cluster.workers["small"].stats.fallbacks == 4
        cluster.accept = lambda *_: True
        await cluster.settled()


async def test_ring_to_the_api_that_is_full_for_a_while_loses_nothing() -> None:
    async with pair("bernoulli", p=0.3).running() as cluster:
        dice = random.Random(5)
        cluster.accept = lambda _, target, __: target != API or dice.random() < 0.3
        answers = await asyncio.gather(*(cluster.generate("demo", [1, i], max_tokens=20, seed=i) for i in range(20)))
        for answer in answers:
            assert len(answer.tokens) == 20
            check_writers(answer)
        await cluster.settled()


async def test_repeated_messages_are_applied_once() -> None:
    async with pair("bernoulli", p=0.4).running() as cluster:

        def twice(source: int, target: int, message: Message) -> bool:
            if isinstance(message, PeerReq | Nack):
                cluster.deliver(target, message)
            return False

        cluster.hold = twice
        answers = await asyncio.gather(*(cluster.generate("demo", [1, i], max_tokens=20, seed=i) for i in range(20)))
        for answer in answers:
            assert len(answer.tokens) == 20
            check_writers(answer)
        await cluster.settled()
        assert sum(w.stats.stale_messages for w in cluster.workers.values()) >= 100


@pytest.mark.parametrize("at", [0, 3])
async def test_failing_step_ends_its_requests_and_not_the_worker(at: int) -> None:
    async with pair("none", small={"fail_at": at}).running() as cluster:
        answer = await cluster.generate("small", [1, 2], max_tokens=8)
        assert (answer.finish, len(answer.tokens)) == ("error", at)
        if at:
            fine = await cluster.generate("small", [1, 2], max_tokens=at)
            assert fine.tokens == SMALL[:at]
        await cluster.settled()


async def test_failing_step_on_the_peer_falls_back() -> None:
    async with pair("every_n", shape="visit", n=2, large={"fail_at": 5}).running() as cluster:
        answer = await cluster.generate("demo", [1, 2], max_tokens=8)
        assert answer.writers == [0, 1, 0, 1, 0, 0, 0, 1]
        check_writers(answer)
        await cluster.settled()


async def test_forced_progress_after_too_many_handoffs(tmp_path: Any) -> None:
    """Two sides that both refuse to write: the runtime makes one of them commit."""
    path = tmp_path / "pingpong.py"
    path.write_text(
        "import torch\n"
        "from algorithms.base import Algorithm, Definition\n"
        "class Never(Algorithm):\n"
        "    def route(self, step):\n"
        "        return torch.ones_like(step.tokens)\n"
        "ALGORITHM = Definition('pingpong', lambda side: Never)\n"
    )
    async with pair(str(path), route={"max_stall": 4}).running() as cluster:
        answer = await cluster.generate("demo", [1, 2], max_tokens=6)
        assert len(answer.tokens) == 6
        check_writers(answer)
        assert answer.handoffs >= 4 * 5
        await cluster.settled()


@dataclass
class Job:
    route: str
    prompt: list[int]
    tokens: int
    abort_after: int | None


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("shape", [{"pages": 24, "slots": 64}, {"pages": 200, "slots": 5}, {"pages": 40, "slots": 64}])
async def test_tight_pools_and_random_aborts(seed: int, shape: dict[str, int]) -> None:
    """Preemption, eviction of visitors and refusals on both sides at once, with traffic in both directions."""
    dice = random.Random(seed)
    settings = {"page_size": 4, "context_length": 80}
    cluster = pair(
        "every_n" if seed % 2 else "bernoulli",
        small=settings | {"delay_ms": 0 if seed % 3 else 0.2},
        large=settings,
        cluster={"num_pages": shape["pages"], "max_slots": shape["slots"], "max_batch_tokens": 32},
        **({"shape": "block", "n": 3} if seed % 2 else {"p": 0.35}),
    )
    jobs = [
        Job(
            dice.choice(["demo", "back", "small", "large"]),
            [dice.randrange(256) for _ in range(dice.randint(1, 30))],
            dice.randint(1, 50),
            dice.randint(0, 20) if dice.random() < 0.3 else None,
        )
        for _ in range(60)
    ]

    async def client(job: Job, number: int) -> None:
        rid, answer = cluster.submit(job.route, job.prompt, max_tokens=job.tokens, seed=number)
        if job.abort_after is not None:
            await answer.until(job.abort_after)
            if not answer.finish:
                cluster.abort(rid, job.route)
                return
        await answer.done.wait()
        scripts = {"demo": (SMALL, LARGE), "back": (LARGE, SMALL), "small": (SMALL, SMALL), "large": (LARGE, LARGE)}
        check_writers(answer, scripts[job.route])
        assert answer.finish == "length"
        assert len(answer.tokens) == job.tokens

    async with cluster.running(), asyncio.timeout(30):
        await asyncio.gather(*(client(job, number) for number, job in enumerate(jobs)))
        await cluster.settled()
        moved = [w.scheduler.preemptions + w.scheduler.evictions for w in cluster.workers.values()]
        if shape["pages"] == 24:
            assert sum(moved) > 0


async def test_visitor_that_cannot_get_room_is_refused() -> None:
    """Both pools are filled by requests that wait for the other side: refusals break the tie."""
    settings = {"page_size": 4, "context_length": 64, "num_pages": 16}
    async with pair("every_n", small=settings, large=settings, shape="block", n=2).running() as cluster:
        answers = [cluster.submit(route, [i] * 20, max_tokens=30)[1] for i in range(4) for route in ("demo", "back")]
        async with asyncio.timeout(30):
            await asyncio.gather(*(a.done.wait() for a in answers))
        for i, answer in enumerate(answers):
            check_writers(answer, (LARGE, SMALL) if i % 2 else (SMALL, LARGE))
            assert len(answer.tokens) == 30
        await cluster.settled()
        assert sum(w.stats.refusals for w in cluster.workers.values()) > 0


async def test_nack_for_an_older_handoff_changes_nothing() -> None:
    async with pair("every_n", shape="visit", n=2).running() as cluster:
        rid, answer = cluster.submit("demo", [1, 2], max_tokens=8)
        cluster.workers["small"].deliver(Nack(rid, LARGE_INDEX, 0, NackReason.FULL))
        await answer.done.wait()
        assert answer.writers == [0, 1] * 4
        await cluster.settled()


async def test_entry_that_does_not_read_gets_its_request_back_later() -> None:
    """The peer neither writes on alone nor loses the way back."""
    async with pair("every_n", shape="visit", n=2).running() as cluster:
        large = cluster.workers["large"]
        stuck = True
        cluster.accept = lambda source, *_: not (stuck and source == LARGE_INDEX)
        _, answer = cluster.submit("demo", [1, 2], max_tokens=8)
        await eventually(lambda: large.outbound.unsent)
        large.deliver(ProcessState(SMALL_INDEX, "stalled"))
        for _ in range(200):  # turns of the loop, in which it would have written on
            await asyncio.sleep(0)
        assert large.stats.tokens == 1
        stuck = False
        large.deliver(ProcessState(SMALL_INDEX, "up"))
        await answer.done.wait()
        assert answer.writers == [0, 1] * 4
        # Four there and three back; the last one ended the answer.
        assert answer.handoffs == 7
        check_writers(answer)
        await cluster.settled()
