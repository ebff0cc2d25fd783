"""What a worker with other ranks says when it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from trouterd.worker import split
from trouterd.worker.split import with_ranks


class Processes:
    """Ranks of which one is lost; the news takes a while."""

    def __init__(self, _name: str, _world: int, *, on_loss: Callable[[str], object], **_options: Any) -> None:
        self.ranks = self
        self.lost = False
        self.tell = on_loss
        self.closed = False

    def close(self) -> None:
        self.closed = True


async def end(serve: Callable[[Any], Any], words: list[str]) -> int:
    return await with_ranks(serve, words.append, "large", 2, log_level="info", log_format="text")


@pytest.mark.parametrize("known", [False, True])
async def test_a_lost_rank_is_the_reason_of_what_fails_because_of_it(
    monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    """A collective breaks off before anybody has said why."""
    monkeypatch.setattr(split, "RankProcesses", Processes)

    async def serve(ranks: Processes) -> int:
        ranks.lost = known
        # It is known at once that one is lost, and how it ended after a while; or nothing yet.
        asyncio.get_running_loop().call_later(1.5 * split.OTHERS_FIRST if known else 0.01, ranks.tell, "rank 1 died")
        raise RuntimeError("connection closed by peer")

    words: list[str] = []
    assert await end(serve, words) == 1
    assert words == ["rank 1 died"]


async def test_what_fails_by_itself_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Processes] = []

    def make(*names: Any, **options: Any) -> Processes:
        made.append(Processes(*names, **options))
        return made[-1]

    async def serve(_ranks: Processes) -> int:
        raise RuntimeError("out of ideas")

    monkeypatch.setattr(split, "RankProcesses", make)
    with pytest.raises(RuntimeError, match="out of ideas"):
        await end(serve, [])
    assert made[0].closed
