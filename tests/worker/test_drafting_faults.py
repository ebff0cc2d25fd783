"""Drafts that are lost, refused, repeated, aborted, or in the hands of faulty code."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ipc.messages import Message, Nack, NackReason, PeerReq
from tests.harness import Answer, Cluster
from tests.worker.test_drafting import MODELS, PAIR, PROMPT, by_large, cluster
from trouterd.config import Route
from trouterd.worker import drafting
from trouterd.worker.events import ProcessState

SMALL, LARGE = 0, 1
SAMPLING: dict[str, Any] = {"max_tokens": 24, "temperature": 1.0, "seed": 5, "ignore_eos": True}


def speculative(**settings: Any) -> Cluster:
    route = Route(models=PAIR, algorithm="speculative", params={"gamma": 4}, **settings)
    return cluster({"demo": route})


def alone(name: str) -> list[int]:
    return by_large(PROMPT, SAMPLING, MODELS[name]).tokens


def is_visit(target: int, message: Message) -> bool:
    return target == LARGE and isinstance(message, PeerReq)


async def eventually(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


async def held(workers: Cluster, wanted: Callable[[int, Message], bool]) -> Answer:
    """An answer whose first message of a kind is under way, and held there."""
    workers.hold = lambda _, target, message: wanted(target, message)
    _, answer = workers.submit("demo", PROMPT, **SAMPLING)
    await eventually(lambda: workers.held)
    workers.hold = lambda *_: False
    return answer


def release(workers: Cluster) -> None:
    for _, target, message in workers.held:
        workers.deliver(target, message)
    workers.held.clear()


async def test_a_peer_without_room_is_asked_again() -> None:
    refusals = 0

    def refuse(_: int, target: int, message: Message) -> bool:
        nonlocal refusals
        if not is_visit(target, message) or refusals % 3 == 2:
            refusals += is_visit(target, message)
            return False
        refusals += 1
        workers.deliver(SMALL, Nack(message.rid, LARGE, message.handoff_seq, NackReason.FULL))
        return True

    async with speculative().running() as workers:
        workers.hold = refuse
        answer = await workers.generate("demo", PROMPT, **SAMPLING)
        assert answer.tokens == alone("large")
        assert workers.workers["small"].stats.fallbacks == 0
        assert refusals > 10
        await workers.settled()


async def test_a_full_ring_is_tried_again() -> None:
    tries = 0

    def accept(_: int, target: int, message: Message) -> bool:
        nonlocal tries
        tries += is_visit(target, message)
        return not is_visit(target, message) or tries % 3 == 0

    async with speculative().running() as workers:
        workers.accept = accept
        answer = await workers.generate("demo", PROMPT, **SAMPLING)
        assert answer.tokens == alone("large")
        assert workers.workers["small"].stats.fallbacks == 0
        await workers.settled()


@pytest.mark.parametrize("policy", ["fallback", "fail"])
async def test_a_peer_that_never_has_room(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafting, "PAUSES", (0.0, 0.0, 0.0))
    async with speculative(on_peer_loss=policy).running() as workers:
        workers.accept = lambda _, target, message: not is_visit(target, message)
        answer = await workers.generate("demo", PROMPT, **SAMPLING)
        if policy == "fail":
            assert (answer.finish, answer.tokens) == ("error", [])
            assert "on_peer_loss" in answer.error
        else:
            assert answer.tokens == alone("small")
            assert answer.accepted == answer.drafted == 24
        workers.accept = lambda *_: True
        await workers.settled()


@pytest.mark.parametrize("policy", ["fallback", "fail"])
@pytest.mark.parametrize("state", ["down", "stalled"])
async def test_a_lost_peer(state: str, policy: str) -> None:
    async with speculative(on_peer_loss=policy).running() as workers:
        answer = await held(workers, lambda target, message: target == SMALL and isinstance(message, PeerReq))
        small = workers.workers["small"]
        small.deliver(ProcessState(LARGE, state))
        await answer.done.wait()
        assert (answer.finish, answer.tokens) == (("error", []) if policy == "fail" else ("length", alone("small")))
        small.deliver(ProcessState(LARGE, "up"))
        release(workers)
        again = await workers.generate("demo", PROMPT, **SAMPLING)
        assert again.tokens == alone("large")
        assert small.stats.stale_messages == 1
        await workers.settled()


async def test_a_peer_lost_during_a_pause() -> None:
    async with speculative().running() as workers:
        workers.accept = lambda _, target, message: not is_visit(target, message)
        rid, answer = workers.submit("demo", PROMPT, **SAMPLING)
        small = workers.workers["small"]
        await eventually(lambda: rid in small.requests and small.requests[rid].retries > 1)
        small.deliver(ProcessState(LARGE, "stalled"))
        await answer.done.wait()
        assert answer.tokens == alone("small")
        workers.accept = lambda *_: True
        small.deliver(ProcessState(LARGE, "up"))
        assert (await workers.generate("demo", PROMPT, **SAMPLING)).tokens == alone("large")
        await workers.settled()


async def test_a_peer_that_does_not_know_the_request_gets_all_of_it() -> None:
    async with speculative().running() as workers:
        workers.hold = lambda _, target, message: target == LARGE and not isinstance(message, PeerReq)
        answer = await workers.generate("demo", PROMPT, **SAMPLING)
        assert answer.tokens == alone("large")
        whole = [m for m in workers.trace if m.submit is not None]
        assert [(m.start, m.loc, len(m.scores), len(m.token_ids) // 4) for m in whole] == [(0, 0, 4, 4)]
        workers.hold = lambda *_: False
        release(workers)
        await workers.settled()


async def test_a_peer_that_was_replaced_between_two_rounds() -> None:
    async with speculative().running() as workers:
        answer = await held(workers, lambda target, m: target == SMALL and isinstance(m, PeerReq) and m.handoff_seq > 4)
        large = workers.workers["large"]
        release(workers)
        request = next(iter(large.requests.values()))
        large.outcomes.forget(request)
        large.registry._ended.clear()
        await answer.done.wait()
        assert answer.tokens == alone("large")
        await workers.settled()


async def test_repeated_messages_are_applied_once() -> None:
    def twice(_: int, target: int, message: Message) -> bool:
        if isinstance(message, PeerReq | Nack):
            workers.deliver(target, message)
        return False

    async with speculative().running() as workers:
        workers.hold = twice
        answers = await asyncio.gather(*(workers.generate("demo", PROMPT, **SAMPLING) for _ in range(8)))
        assert all(answer.tokens == alone("large") for answer in answers)
        await workers.settled()
        assert sum(w.stats.stale_messages for w in workers.workers.values()) >= 8 * answers[0].handoffs


async def test_an_abort_while_drafts_are_away() -> None:
    async with speculative().running() as workers:
        await held(workers, lambda target, message: target == SMALL and isinstance(message, PeerReq))
        workers.abort(1, "demo")
        await workers.settled()
        release(workers)
        assert (await workers.generate("demo", PROMPT, **SAMPLING)).tokens == alone("large")
        assert workers.workers["small"].stats.stale_messages == 1
        await workers.settled()


async def test_an_abort_during_a_pause() -> None:
    async with speculative().running() as workers:
        workers.accept = lambda _, target, message: not is_visit(target, message)
        rid, _ = workers.submit("demo", PROMPT, **SAMPLING)
        small = workers.workers["small"]
        await eventually(lambda: rid in small.requests and small.requests[rid].retries > 1)
        workers.abort(rid, "demo")
        await workers.settled()
        workers.accept = lambda *_: True
        assert (await workers.generate("demo", PROMPT, **SAMPLING)).tokens == alone("large")
        await workers.settled()


async def test_a_step_that_fails_while_it_verifies() -> None:
    async with speculative().running() as workers:
        large = workers.workers["large"]
        runner = large.stepper.runner
        step, calls = runner.step, 0

        def failing(batch: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 3:
                raise RuntimeError("as told")
            return step(batch)

        runner.step = failing  # type: ignore[method-assign]
        answer = await workers.generate("demo", PROMPT, **SAMPLING)
        # One round by the small model; before and after it every token is the large model's choice.
        assert workers.workers["small"].stats.fallbacks == 1
        assert len(answer.tokens) == 24
        await workers.settled()


BROKEN = """
from algorithms.base import Definition
from algorithms.drafting import Drafter, Verdict, Verifier
class Small(Drafter):
    def score(self, step):
        return {score}
    def judge(self, drafts):
        return {judge}
    def send(self, request, model):
        return {send}
    def receive(self, request, tokens, payload):
        return {receive}
class Large(Verifier):
    def accept(self, rows):
        return {accept}
ALGORITHM = Definition("broken", lambda side: Large if side else Small)
"""
FINE = {
    "score": "super().score(step)",
    "judge": "Verdict.VERIFY if len(drafts) == 2 else Verdict.DRAFT",
    "send": "super().send(request, model)",
    "receive": "len(tokens)",
    "accept": "super().accept(rows)",
}


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [
        ({}, "large"),
        ({"score": "1 / 0"}, "error"),
        ({"score": "step.index[:0].float()"}, "error"),
        ({"judge": "1 / 0"}, "error"),
        ({"judge": "'verify'"}, "large of one draft"),
        ({"judge": "7"}, "error"),
        ({"accept": "1 / 0"}, "small"),
        ({"send": "1 / 0"}, "small"),
        ({"receive": "1"}, "large"),
        ({"receive": "1 / 0"}, "small"),
        ({"accept": "rows.tokens[:1] == 0"}, "small"),
    ],
)
async def test_code_of_users(fault: dict[str, str], outcome: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text(BROKEN.format(**(FINE | fault)))
    async with cluster({"demo": Route(models=PAIR, algorithm=str(path))}).running() as workers:
        answer, other = await asyncio.gather(
            workers.generate("demo", PROMPT, **SAMPLING), workers.generate("large", PROMPT, **SAMPLING)
        )
        assert other.tokens == alone("large")
        if outcome == "error":
            assert (answer.finish, answer.tokens) == ("error", [])
        else:
            assert answer.tokens == alone(outcome.split()[0])
        await workers.settled()
