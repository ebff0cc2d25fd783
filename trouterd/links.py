"""All rings of one process: messages by the name of the process at the other end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import msgspec

from ipc.errors import RingClosedError, RingPoisonedError
from ipc.messages import Message, decode, encode
from ipc.outbox import Outbox
from ipc.reader import RingReader
from ipc.ring import RingConsumer, RingProducer
from ipc.segment import SharedSegment
from ipc.writer import RingWriter
from trouterd.config import Rings
from trouterd.control import Link

log = logging.getLogger(__name__)

Receive = Callable[[str, Message], None]


@dataclass(frozen=True, slots=True)
class _Inbound:
    segment: SharedSegment
    consumer: RingConsumer
    reader: RingReader


@dataclass(frozen=True, slots=True)
class _Outbound:
    segment: SharedSegment
    producer: RingProducer
    outbox: Outbox
    writer: RingWriter


class Links:
    """Attaches to inherited rings, sends and receives message structs on them.

    Args:
        loop: the process's event loop; every method is called in it.
        inbound: rings that this process consumes.
        outbound: rings that it produces into.
        settings: spill limits and spin.
        receive: called with the sender's name and each message.
        stale: the same for messages that were meant for a dead predecessor of this process.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        inbound: list[Link],
        outbound: list[Link],
        settings: Rings,
        receive: Receive,
        stale: Receive,
    ) -> None:
        self._receive = receive
        self.bad_records = 0
        self.broken: asyncio.Future[str] = loop.create_future()
        """Done, with the reason, when a ring cannot be used any more; the process should end and be restarted."""
        self._out = {link.peer: self._open_outbound(loop, link, settings) for link in outbound}
        self._in = {link.peer: self._open_inbound(loop, link, settings, stale) for link in inbound}

    @property
    def max_message(self) -> int:
        """Bytes of the largest message that every outbound ring takes."""
        return min(o.segment.spec.max_message for o in self._out.values())

    def start(self) -> None:
        """Begin to receive, and to flush spills as room appears."""
        for outbound in self._out.values():
            outbound.writer.start()
        for inbound in self._in.values():
            inbound.reader.start()

    def send(self, peer: str, message: Message) -> bool:
        """Put a message on the ring to a process; False when ring and spill are full or the ring is closed."""
        payload, kind = encode(message)
        try:
            return self._out[peer].outbox.send(payload, kind)
        except RingClosedError:
            return False
        except RingPoisonedError as error:
            self._break(str(error))
            return False

    @contextmanager
    def together(self, most: int = 0) -> Iterator[None]:
        """What is sent inside leaves at the end, so that no receiver starts on the first of several messages; or, where so many are
        gathered, at once."""
        for outbound in self._out.values():
            outbound.outbox.gather(most)
        try:
            yield
        finally:
            for outbound in self._out.values():
                self._release(outbound.outbox)

    def catch_up(self, peer: str) -> None:
        """Receive at once what a process has sent so far."""
        if peer in self._in:
            self._in[peer].reader.catch_up()

    def describe(self, peer: str) -> str:
        """One line on the ring to a process, for a log entry about a peer that does not read."""
        outbound = self._out[peer]
        spec = outbound.segment.spec
        used = spec.capacity - outbound.producer.free_bytes
        records, size = outbound.outbox.depth
        return f"ring to {peer}: {used} of {spec.capacity} bytes in use, {records} messages ({size} bytes) spilled"

    async def aclose(self) -> None:
        """Stop reading and writing, and let go of the segments."""
        for inbound in self._in.values():
            await inbound.reader.aclose()
            inbound.consumer.close()
            inbound.segment.close()
        for outbound in self._out.values():
            await outbound.writer.aclose()
            outbound.producer.close()
            outbound.segment.close()

    def _open_inbound(self, loop: asyncio.AbstractEventLoop, link: Link, settings: Rings, stale: Receive) -> _Inbound:
        segment = SharedSegment.from_fd(link.ring_fd)
        consumer = RingConsumer(segment, link.data_event_fd, link.space_event_fd)
        peer = link.peer
        consumer.attach_policy(partial(self._dispatch, peer, stale))
        reader = RingReader(
            loop,
            consumer,
            partial(self._dispatch, peer, self._receive),
            spin_us=settings.spin_us,
            on_poisoned=lambda error: self._break(str(error)),
        )
        return _Inbound(segment, consumer, reader)

    def _open_outbound(self, loop: asyncio.AbstractEventLoop, link: Link, settings: Rings) -> _Outbound:
        segment = SharedSegment.from_fd(link.ring_fd)
        producer = RingProducer(segment, link.data_event_fd, link.space_event_fd)
        outbox = Outbox(producer, spill_records=settings.spill_records, spill_bytes=settings.spill_bytes)
        return _Outbound(segment, producer, outbox, RingWriter(loop, outbox))

    def _dispatch(self, peer: str, receive: Receive, kind: int, view: memoryview) -> None:
        try:
            message = decode(kind, view)
        except msgspec.DecodeError as error:
            self.bad_records += 1
            log.error("record from %s dropped: %s", peer, error)
            return
        receive(peer, message)

    def _release(self, outbox: Outbox) -> None:
        """A ring that refuses keeps no other one from sending."""
        try:
            outbox.release()
        except RingClosedError:
            pass  # the next send is refused
        except RingPoisonedError as error:
            self._break(str(error))

    def _break(self, reason: str) -> None:
        log.critical("%s", reason)
        if not self.broken.done():
            self.broken.set_result(reason)
