"""Messages of different rings in unlucky orders, deaths between two of them, and users' algorithms that misbehave."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ipc.messages import Active, Message, PeerReq, Sampling, Submit, Warm, pack_ids
from models.script import ScriptRunner
from tests.harness import Answer, Cluster
from trouterd.config import Route
from trouterd.worker.events import ProcessState
from trouterd.worker.gauges import gauges

NAMES = ("small", "large", "huge")
SMALL, LARGE, HUGE = range(3)
SCRIPTS = tuple([base + i for i in range(64)] for base in (10, 90, 170))


def chain(algorithm: str, models: int = 3, route: dict[str, Any] | None = None, **runners: Any) -> Cluster:
    """Scripted workers behind the route "demo"; settings of single runners by model name."""
    names = NAMES[:models]
    params = route or {}
    return Cluster(
        {
            name: ScriptRunner(script, vocab_size=258, eos=257, **runners.get(name, {}))
            for name, script in zip(names, SCRIPTS, strict=False)
        },
        {"demo": Route(models=list(names), algorithm=algorithm, params=params)},
    )


def blocks(n: int, models: int = 3, **runners: Any) -> Cluster:
    return chain("every_n", models, {"shape": "block", "n": n}, **runners)


def check_writers(answer: Answer, tokens: int) -> None:
    assert answer.tokens == [SCRIPTS[w][t] for t, w in enumerate(answer.writers)]
    assert len(answer.tokens) == tokens


async def eventually(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


def release(cluster: Cluster, wanted: Callable[[int, int, Message], bool] = lambda *_: True) -> None:
    """Deliver what was held back, or the part of it that is wanted, in order."""
    held, cluster.held = cluster.held, []
    for source, target, message in held:
        if wanted(source, target, message):
            cluster.deliver(target, message)
        else:
            cluster.held.append((source, target, message))


async def settled(cluster: Cluster, *names: str) -> None:
    """The workers that the others do not believe dead hold no request any more."""
    for name in names:
        await eventually(cluster.workers[name].idle.is_set)
        cluster.workers[name].kv.check()
        assert cluster.workers[name].kv.counts()["owned"] == 0


# Who holds the request


async def test_partial_that_names_a_dead_holder() -> None:
    """The entry hears that a model died before it hears that this model had the request."""
    async with blocks(2).running() as cluster:
        cluster.hold = lambda source, _, message: isinstance(message, PeerReq) and source in (LARGE, HUGE)
        _, answer = cluster.submit("demo", [1, 2], max_tokens=8)
        await eventually(lambda: any(m.destination == HUGE for m in cluster.trace))
        cluster.workers["small"].deliver(ProcessState(HUGE, "down"))
        cluster.hold = lambda *_: False
        release(cluster, lambda source, target, _: (source, target) == (LARGE, SMALL))
        await answer.done.wait()
        check_writers(answer, 8)
        await settled(cluster, "small", "large")


async def test_giver_that_dies_before_its_handoff_is_on_its_way() -> None:
    """The entry was told of the next holder by a model that died with the hand-off unsent."""
    async with blocks(2).running() as cluster:
        cluster.hold = lambda source, target, _: (source, target) == (LARGE, HUGE)
        _, answer = cluster.submit("demo", [1, 2], max_tokens=8)
        await eventually(lambda: cluster.held)
        await answer.until(4)
        cluster.workers["small"].deliver(ProcessState(LARGE, "down"))
        await answer.done.wait()
        check_writers(answer, 8)
        await settled(cluster, "small", "huge")


BOUNCE = """
import torch
from algorithms.base import Algorithm, Definition
class Bounce(Algorithm):
    "small to large, large once to huge, huge back to large, which then stays; nobody keeps its sample."
    def route(self, step):
        side = self.context.side
        first = [not state.setdefault('seen', 0) for state in step.state]
        for state in step.state:
            state['seen'] = 1
        to = {0: 1, 1: 2, 2: 2}[side]
        return torch.tensor([to if side != 1 or f else 0 for f in first])
ALGORITHM = Definition('bounce', lambda side: Bounce, min_models=3, max_models=3)
"""


async def test_late_word_on_an_earlier_holder_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "bounce.py"
    path.write_text(BOUNCE)
    async with chain(str(path)).running() as cluster:
        cluster.hold = lambda source, target, _: (source, target) == (LARGE, SMALL)
        _, answer = cluster.submit("demo", [1, 2], max_tokens=8)
        await eventually(lambda: any((m.source, m.destination) == (HUGE, LARGE) and m.partial for m in cluster.trace))
        await eventually(lambda: len(cluster.held) > 1)
        # The large model's word that the huge one holds the request comes after the huge one's that it does no more.
        source, target, message = cluster.held[0]
        assert isinstance(message, PeerReq)
        assert (message.partial, message.destination, message.token_ids) == (True, HUGE, b"")
        cluster.deliver(target, message)
        await eventually(lambda: not cluster.workers["small"]._inbox)
        cluster.workers["small"].deliver(ProcessState(LARGE, "down"))
        await answer.done.wait()
        check_writers(answer, 8)


# Nothing stays behind


async def test_peer_that_the_entry_believes_ignorant_hears_of_the_end() -> None:
    """A direct hop overtakes the prompt, is refused as unknown, cannot be repeated; then the prompt arrives."""
    async with blocks(2).running() as cluster:
        cluster.hold = lambda _, target, message: target == HUGE and isinstance(message, Warm)
        cluster.accept = lambda source, target, message: (
            not ((source, target) == (LARGE, HUGE) and isinstance(message, PeerReq) and message.submit is not None)
        )
        _, answer = cluster.submit("demo", [1, 2], max_tokens=10)
        await eventually(lambda: any(m.source == LARGE and m.destination == SMALL for m in cluster.trace))
        cluster.hold = lambda *_: False
        release(cluster)
        await answer.done.wait()
        check_writers(answer, 10)
        await cluster.settled()


async def test_hop_that_arrives_after_the_end_is_not_opened() -> None:
    """Its sender has forgotten the request and would not hear that the step failed here."""
    async with blocks(2, huge={"fail_at": 4}).running() as cluster:
        cluster.accept = lambda _, target, message: not (target == HUGE and isinstance(message, Warm))
        cluster.hold = lambda source, target, _: (source, target) == (LARGE, HUGE)
        rid, _ = cluster.submit("demo", [1, 2], max_tokens=10)
        await eventually(lambda: cluster.held)
        cluster.abort(rid, "demo")
        await cluster.settled()
        cluster.hold = lambda *_: False
        release(cluster)
        await eventually(lambda: cluster.workers["huge"].stats.stale_messages)
        await cluster.settled()


def submit(rid: int = 99, max_tokens: int = 3) -> Submit:
    return Submit(rid, "demo", pack_ids([1, 2]), Sampling(seed=0, max_tokens=max_tokens, temperature=0.0))


async def test_prompt_of_a_dead_entry_is_not_kept() -> None:
    async with blocks(2).running() as cluster:
        large = cluster.workers["large"]
        large.deliver(ProcessState(SMALL, "down"))
        large.deliver(Warm(submit(), SMALL))
        await eventually(lambda: not large._inbox)
        await cluster.settled()


@pytest.mark.parametrize("max_tokens", [3, 64])
async def test_visit_for_a_dead_entry_ends(max_tokens: int) -> None:
    """A third model's hop is read after the entry's death: whether the visit ends the answer or fails, it is forgotten."""
    cluster = chain("none", large={"fail_at": 5}, route={})
    async with cluster.running():
        large = cluster.workers["large"]
        large.deliver(ProcessState(SMALL, "down"))
        hop = PeerReq(99, HUGE, LARGE, SMALL, 2, 0, b"", 0, (0, 0, 0), b"", submit=submit(max_tokens=max_tokens))
        large.deliver(hop)
        await eventually(lambda: large.stats.submitted or large.stats.tokens >= 3)
        await cluster.settled()


async def test_visitor_that_wrote_is_given_up_while_the_ring_to_its_entry_is_full() -> None:
    async with blocks(3, 2, large={"fail_at": 5}).running() as cluster:
        refused = 0

        def accept(source: int, target: int, message: Message) -> bool:
            nonlocal refused
            full = isinstance(message, PeerReq) and (source, target) == (LARGE, SMALL) and not message.partial
            refused += full
            return not full or refused > 3

        cluster.accept = accept
        answer = await cluster.generate("demo", [1, 2], max_tokens=9)
        assert answer.writers == [0, 0, 0, 1, 1, 0, 0, 0, 0]
        check_writers(answer, 9)
        assert cluster.workers["large"].stats.refusals == 1
        await cluster.settled()


async def test_blocked_visitor_is_given_up_once_while_its_entry_is_stalled() -> None:
    """Three visitors write on in a pool that cannot hold them; their entry takes nothing for a while."""
    runner = {"page_size": 4, "context_length": 64}
    cluster = Cluster(
        {
            "small": ScriptRunner(SCRIPTS[0], vocab_size=258, eos=257, num_pages=64, **runner),
            "large": ScriptRunner(SCRIPTS[1], vocab_size=258, eos=257, num_pages=16, **runner),
        },
        {
            "demo": Route(models=["small", "large"], algorithm="every_n", params={"shape": "block", "n": 1}),
            "back": Route(models=["large", "small"], algorithm="every_n", params={"shape": "block", "n": 1}),
        },
    )
    async with cluster.running():
        large = cluster.workers["large"]
        # All pages of the large model are pinned by its own requests, which are away.
        cluster.hold = lambda source, target, message: isinstance(message, PeerReq) and source == SMALL
        own = [cluster.submit("back", [i] * 15, max_tokens=20)[1] for i in range(4)]
        await eventually(lambda: gauges(large)["requests_pending"] == 4 and len(cluster.held) == 4)
        cluster.accept = lambda source, target, message: target != SMALL or source != LARGE
        cluster.hold = lambda source, target, message: message in [m for *_, m in cluster.held]
        visitor = cluster.submit("demo", [9] * 15, max_tokens=20)[1]
        await eventually(lambda: large.stats.refusals)
        for _ in range(50):
            await asyncio.sleep(0)
        assert large.stats.refusals == 1
        cluster.accept = lambda *_: True
        cluster.hold = lambda *_: False
        release(cluster)
        for answer in (*own, visitor):
            await answer.done.wait()
            assert len(answer.tokens) == 20
        await cluster.settled()


async def test_count_of_active_requests_is_told_as_soon_as_there_is_room() -> None:
    async with blocks(2, 2).running() as cluster:
        large = cluster.workers["large"]
        refusals = 0

        def accept(source: int, target: int, message: Message) -> bool:
            nonlocal refusals
            last = isinstance(message, Active) and not cluster.workers["small"].requests
            refusals += last
            return not last or refusals > 2

        cluster.accept = accept
        await cluster.generate("demo", [1, 2], max_tokens=8)
        await eventually(lambda: large.active.total == 0 and refusals > 2)


async def test_request_that_no_context_holds_is_refused() -> None:
    async with blocks(2, 2, small={"context_length": 16}).running() as cluster:
        for prompt in ([], [1] * 12):
            answer = await cluster.generate("demo", prompt, max_tokens=8)
            assert (answer.finish, answer.tokens) == ("error", [])
        await cluster.generate("demo", [1] * 8, max_tokens=8)
        await cluster.settled()


# Users' algorithms

FAULTY = """
import sys
import torch
from algorithms.base import Algorithm, Definition, Handoff
class Faulty(Algorithm):
    keep_sample = True
    def route(self, step):
        if FAULT == 'route raises' and (step.index == 3).any():
            raise RuntimeError('as told')
        if FAULT == 'route exits' and (step.index == 3).any():
            sys.exit('as told')
        here = self.context.side
        to = (step.index + 1) // 2 % 2
        where = to if here == 0 else 1 - to
        if FAULT == 'unknown model':
            where = torch.where(step.index == 3, 7, where)
        if FAULT == 'negative':
            where = torch.where(step.index == 3, -1, where)
        return where[:-1] if FAULT == 'too few' and (step.index == 3).any() else where
    def send(self, request, model):
        if FAULT == 'send raises':
            raise RuntimeError('as told')
        if FAULT == 'send exits':
            sys.exit('as told')
        handoff = super().send(request, model)
        if FAULT == 'send gives a tuple':
            return handoff.start, handoff.loc
        if FAULT == 'send gives text':
            return Handoff('two', handoff.loc)
        if FAULT == 'send too far':
            return Handoff(handoff.start + 1, handoff.loc)
        if FAULT.startswith('combine'):
            return Handoff(handoff.start, handoff.loc, b'payload')
        return Handoff(-1, handoff.loc) if FAULT == 'send too early' else handoff
    def receive(self, request, tokens, payload):
        if FAULT == 'entry receive raises' and self.context.side == 0:
            raise RuntimeError('as told')
        if FAULT == 'receive gives no number':
            return None
        if FAULT == 'peer receive raises' and self.context.side == 1:
            raise RuntimeError('as told')
        if FAULT == 'entry takes nothing' and self.context.side == 0:
            return 0
        if FAULT == 'entry takes one' and self.context.side == 0:
            return min(1, len(tokens))
        if FAULT == 'peer takes nothing' and self.context.side == 1:
            return 0
        return len(tokens) + 5 if FAULT == 'takes more' else len(tokens)
    def combine(self, request, payload):
        assert payload == b'payload'
        if FAULT == 'combine raises':
            raise RuntimeError('as told')
        return {'combine gives text': 'x', 'combine gives no token': 10**9, 'combine is negative': -1}[FAULT]
ALGORITHM = Definition('faulty', lambda side: Faulty)
"""
ENDS = ("route raises", "route exits", "unknown model", "negative", "too few")
GOES_ON = (
    "send raises",
    "send exits",
    "send gives a tuple",
    "send gives text",
    "send too far",
    "send too early",
    "entry receive raises",
    "peer receive raises",
    "receive gives no number",
    "entry takes nothing",
    "entry takes one",
    "peer takes nothing",
    "takes more",
    "combine raises",
    "combine gives text",
    "combine gives no token",
    "combine is negative",
)


@pytest.mark.parametrize("fault", [*ENDS, *GOES_ON])
async def test_fault_of_an_algorithm_stays_with_its_requests(fault: str, tmp_path: Path) -> None:
    path = tmp_path / "faulty.py"
    path.write_text(f"FAULT = {fault!r}\n{FAULTY}")
    async with chain(str(path), 2).running() as cluster:
        others = [cluster.submit("small", [1], max_tokens=30)[1] for _ in range(3)]
        answer = await cluster.generate("demo", [1, 2], max_tokens=12)
        if fault in ENDS:
            # Index 3 is the peer's, which gives up; the entry meets the same fault there.
            assert answer.finish == "error"
            assert len(answer.tokens) == 3
        else:
            check_writers(answer, 12)
            assert answer.finish == "length"
        for other in others:
            await other.done.wait()
            assert other.tokens == SCRIPTS[SMALL][:30]
        await cluster.settled()
