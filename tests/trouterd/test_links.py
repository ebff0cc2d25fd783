"""Rings of one process by the name of the other end."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import pytest

from ipc import layout
from ipc.eventfd import create_event
from ipc.layout import RingSpec, State
from ipc.messages import Finish
from ipc.ring import RingConsumer
from ipc.segment import SharedSegment
from trouterd.config import Rings
from trouterd.control import Link
from trouterd.links import Links

Outbound = dict[str, tuple[SharedSegment, Link]]


@pytest.fixture
def outbound() -> Iterator[Outbound]:
    """Two rings; Links maps them a second time and closes what it maps, not the events."""
    made: Outbound = {}
    for number, peer in enumerate(("first", "second")):
        segment = SharedSegment.create(RingSpec(ring_id=1 << 32 | number, capacity=4096, max_record=1024))
        made[peer] = segment, Link(peer, segment.fileno(), create_event(), create_event())
    yield made
    for segment, link in made.values():
        segment.close()
        os.close(link.data_event_fd)
        os.close(link.space_event_fd)


@pytest.mark.parametrize("state", [State.CLOSED, State.POISONED])
async def test_a_ring_that_refuses_what_was_gathered_keeps_no_other_from_sending(
    outbound: Outbound, state: State
) -> None:
    links = Links(
        asyncio.get_running_loop(),
        [],
        [link for _, link in outbound.values()],
        Rings(),
        lambda *_: None,
        lambda *_: None,
    )
    first, (second, to_second) = outbound["first"][0], outbound["second"]
    with links.together():
        assert links.send("first", Finish(1))
        assert links.send("second", Finish(2))
        first.halves[layout.OFF_STATE // 4] = state
    assert links.broken.done() == (state is State.POISONED)
    assert not links.send("first", Finish(3))
    assert links.send("second", Finish(4))
    with RingConsumer(second, to_second.data_event_fd, to_second.space_event_fd) as consumer:
        assert consumer.poll(lambda kind, view: None) == 2
    await links.aclose()
