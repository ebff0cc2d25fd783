"""The rings between all processes: created and kept by the supervisor, inherited by the two ends of each."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ipc.errors import SegmentError
from ipc.eventfd import create_event
from ipc.layout import RingSpec, State
from ipc.segment import SharedSegment
from trouterd.config import Rings
from trouterd.control import Link

MAX_RECORD = 1 << 18


@dataclass(frozen=True, slots=True)
class _Ring:
    segment: SharedSegment
    data_event: int
    space_event: int

    @property
    def fds(self) -> list[int]:
        return [self.segment.fileno(), self.data_event, self.space_event]

    def link(self, peer: str) -> Link:
        return Link(peer, self.segment.fileno(), self.data_event, self.space_event)

    def close(self) -> None:
        self.segment.close()
        os.close(self.data_event)
        os.close(self.space_event)


class RingMesh:
    """One ring per ordered pair of processes, by (source, destination)."""

    def __init__(self, names: list[str], settings: Rings) -> None:
        """
        Args:
            names: all processes; a process's index in it goes into the ring ids.
            settings: capacity and checksum.

        Raises:
            SegmentError: not enough shared memory; says how much is needed and free.
        """
        self._names = names
        self._settings = settings
        self._rings: dict[tuple[str, str], _Ring] = {}
        with contextlib.ExitStack() as stack:
            stack.callback(self.close)
            for source in names:
                for destination in names:
                    if source != destination:
                        self._rings[source, destination] = self._create(source, destination)
            stack.pop_all()

    def links(self, name: str) -> tuple[list[Link], list[Link]]:
        """What a process consumes and what it produces into."""
        inbound = [ring.link(source) for (source, destination), ring in self._rings.items() if destination == name]
        outbound = [ring.link(destination) for (source, destination), ring in self._rings.items() if source == name]
        return inbound, outbound

    def fds(self, name: str) -> list[int]:
        """Descriptors that a process must inherit."""
        return [fd for _, ring in self._of(name) for fd in ring.fds]

    def kick(self, name: str) -> None:
        """Wake both ends of every ring from and to a process, so that nobody sleeps on one that died."""
        for _, ring in self._of(name):
            for event in (ring.data_event, ring.space_event):
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_write(event, 1)

    def replace_poisoned(self, name: str) -> list[str]:
        """Make new rings in place of a process's poisoned ones; returns the processes that hold the other ends.

        Those must be restarted: they still map the old ring, which refuses all use.

        Raises:
            SegmentError: not enough shared memory; the old ring stays.
        """
        peers = []
        for (source, destination), ring in list(self._of(name)):
            if ring.segment.state is State.POISONED:
                self._rings[source, destination] = self._create(source, destination)
                ring.close()
                peers.append(destination if source == name else source)
        return peers

    def report(self, name: str | None = None) -> list[dict[str, Any]]:
        """Fill, spill and counters of every ring (of one process)."""
        rings = self._of(name) if name else self._rings.items()
        return [{"from": source, "to": destination} | ring.segment.stats() for (source, destination), ring in rings]

    def close(self) -> None:
        """Let go of all segments and events."""
        for ring in self._rings.values():
            ring.close()
        self._rings.clear()

    def _of(self, name: str) -> Iterator[tuple[tuple[str, str], _Ring]]:
        return ((pair, ring) for pair, ring in self._rings.items() if name in pair)

    def _create(self, source: str, destination: str) -> _Ring:
        capacity = self._settings.capacity
        ring_id = self._names.index(source) << 32 | self._names.index(destination)
        try:
            segment = SharedSegment.create(
                RingSpec(ring_id, capacity, min(MAX_RECORD, capacity // 4), self._settings.checksum)
            )
        except SegmentError as error:
            total = len(self._names) * (len(self._names) - 1)
            raise SegmentError(f"{error} ({total} rings of rings.capacity = {capacity} bytes)") from error
        return _Ring(segment, create_event(), create_event())
