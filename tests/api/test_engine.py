"""The engine client against late, repeated and missing updates."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest

from ipc.messages import Abort, Message, Sampling, Submit, Tokens, TokenUpdate, pack_ids, unpack_ids
from models.tokenizer import Tokenizer
from tests.api.harness import config
from trouterd.api.catalog import Catalog
from trouterd.api.engine import MIN_TICK, EngineClient, Unfinished
from trouterd.api.errors import RequestError
from trouterd.api.live import Job, LiveRequest
from trouterd.control import PeerState


class Sent:
    """Remembers what the engine client sends."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def __call__(self, worker: str, message: Message) -> bool:
        self.messages.append(message)
        return True


class Bench:
    """An engine client with one live request."""

    def __init__(self, tokenizer: Tokenizer, epoch: int = 1, choices: int = 1) -> None:
        settings = config()
        self.sent = Sent()
        self.engine = EngineClient(settings, self.sent, epoch=epoch)
        for name in settings.models:
            self.engine.on_peer_state(PeerState(name, "up", 1))
        catalog = Catalog(settings, dict.fromkeys(settings.models, tokenizer), {"small": 64, "large": 64})
        jobs = [Job(pack_ids([1, 2]), 2, Sampling(seed=1, max_tokens=9, choice=choice)) for choice in range(choices)]
        self.live: LiveRequest = self.engine.submit(
            catalog.get("demo"), jobs, request_id="r", params={}, created=time.monotonic()
        )
        self.rid = self.live.generations[0].rid

    def deliver(self, seq: int, ids: list[int], finish: str = "", rid: int | None = None) -> None:
        """One update as a record of its own."""
        update = TokenUpdate(self.rid if rid is None else rid, seq, pack_ids(ids), bytes(len(ids)), finish)
        self.engine.deliver("small", Tokens((update,)))

    async def ids(self) -> list[int]:
        """Ids handed out so far."""
        return [token for _, update in await self.live.updates() for token in unpack_ids(update.ids)]


async def test_repeated_and_overlapping_updates_are_applied_once(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer)
    with bench.live:
        bench.deliver(0, [5, 6])
        bench.deliver(0, [5, 6])
        bench.deliver(1, [6, 7])
        assert await bench.ids() == [5, 6, 7]
        assert bench.engine.metrics.stale_updates == 2
        bench.deliver(2, [7], "stop")
        ((_, update),) = await bench.live.updates()
        assert (update.ids, update.finish) == (b"", "stop")
    assert bench.engine.metrics.generation_tokens["demo"] == 3


async def test_updates_after_the_finish_are_stale(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer)
    with bench.live:
        bench.deliver(0, [5], "length")
        bench.deliver(1, [6])
        bench.deliver(0, [1], rid=12345)
        assert await bench.ids() == [5]
    assert bench.engine.metrics.stale_updates == 2
    assert not any(isinstance(message, Abort) for message in bench.sent.messages)


async def test_a_gap_fails_the_request(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, choices=2)
    with bench.live:
        bench.deliver(0, [5])
        bench.deliver(2, [7])
        assert await bench.ids() == [5]
        with pytest.raises(RequestError, match="lost"):
            await bench.live.updates()
    aborted = [message.rid for message in bench.sent.messages if isinstance(message, Abort)]
    assert aborted == [one.rid for one in bench.live.generations], "every choice, once"
    assert bench.engine.active == 0


async def test_periodic_work_has_a_shortest_interval() -> None:
    assert EngineClient(config(keepalive_interval=1e-9), lambda worker, message: True).tick_interval == MIN_TICK


async def test_ids_of_two_epochs_never_meet(tokenizer: Tokenizer) -> None:
    old, new = Bench(tokenizer, epoch=1), Bench(tokenizer, epoch=2)
    with old.live, new.live:
        assert old.rid >> 40 == 1
        assert new.rid >> 40 == 2
        new.deliver(0, [5], rid=old.rid)
        assert new.engine.metrics.stale_updates == 1
    submits = [message for message in new.sent.messages if isinstance(message, Submit)]
    assert [submit.rid for submit in submits] == [new.rid]


async def test_drained_waits_for_the_handler(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer)
    with bench.live:
        bench.deliver(0, [5], "stop")
        drain = asyncio.create_task(bench.engine.drain(None))
        await asyncio.sleep(0)
        assert bench.engine.active == 0
        assert not drain.done(), "the answer is not written yet"
    assert await drain == Unfinished(cut=0, failed=0)


@pytest.mark.parametrize(("ended", "cut"), [(0, 2), (1, 1), (2, 2)])
async def test_what_its_client_does_not_read_is_cut_off(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, ended: int, cut: int
) -> None:
    """Choices that have ended, too: the handler could not write all of them."""
    monkeypatch.setattr("trouterd.api.engine.FORCE_GRACE", 0.01)
    bench = Bench(tokenizer, choices=2)
    with bench.live:
        for generation in bench.live.generations[:ended]:
            bench.engine.settle(generation, "stop")
        assert await bench.engine.drain(0.01) == Unfinished(cut=cut, failed=0)


@pytest.mark.parametrize("code", ["", "worker_lost", "aborted", "client"])
async def test_drained_counts_what_failed_meanwhile(tokenizer: Tokenizer, code: str) -> None:
    """Of two choices one is finished; how the operator's aborts and clients' mistakes end says nothing of the drain."""
    bench = Bench(tokenizer, choices=2)
    with contextlib.suppress(RequestError), bench.live:
        drain = asyncio.create_task(bench.engine.drain(None))
        await asyncio.sleep(0)
        bench.engine.settle(bench.live.generations[0], "stop")
        match code:
            case "worker_lost":
                bench.engine.on_peer_state(PeerState("small", "down", 1))
            case "aborted":
                bench.engine.abort("r")
            case "client":
                bench.engine.fail(bench.live, RequestError(400, "engine_error", "no such parameter"))
            case _:
                bench.deliver(0, [5], "stop", rid=bench.live.generations[1].rid)
                bench.engine.settle(bench.live.generations[1], "stop")
        await bench.live.updates()
    assert await drain == Unfinished(cut=0, failed=int(code == "worker_lost"))
