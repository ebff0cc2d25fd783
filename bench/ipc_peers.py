"""What the ring is compared with, each in its best idiom: zmq, pipes, queues and Unix sockets."""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
import tempfile
import time
from collections.abc import Callable
from typing import Protocol, cast

import uvloop
import zmq

BUFFER = 1 << 18
LENGTH = 4  # bytes in front of each frame on a socket


class Channel(Protocol):
    """A blocking pair of directions; `side` 0 measures."""

    def open(self, side: int) -> None: ...

    def put(self, payload: bytes) -> None: ...

    def get(self) -> bytes: ...


class ZmqChannel:
    """PUSH and PULL over ipc://, high-water mark 1000."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="bench-ipc-")

    def open(self, side: int) -> None:
        """Contexts must not cross a fork, so everything is made here."""
        context = zmq.Context()
        sockets = []
        for direction, kind in ((side, zmq.PUSH), (1 - side, zmq.PULL)):
            end = context.socket(kind)
            end.set_hwm(1000)
            address = f"ipc://{self._folder.name}/{direction}"
            if kind == zmq.PULL:
                end.bind(address)
            else:
                end.connect(address)
            sockets.append(end)
        self.put, self._pull = sockets[0].send, sockets[1]

    def get(self) -> bytes:
        """One message."""
        return self._pull.recv()


class PipeChannel:
    """multiprocessing.Pipe with send_bytes and recv_bytes."""

    def __init__(self) -> None:
        self._ends = multiprocessing.Pipe()

    def open(self, side: int) -> None:
        """Nothing to make."""
        self.put, self.get = self._ends[side].send_bytes, self._ends[side].recv_bytes


class QueueChannel:
    """multiprocessing.Queue; it pickles."""

    def __init__(self) -> None:
        self._queues: tuple[multiprocessing.Queue[bytes], multiprocessing.Queue[bytes]] = (
            multiprocessing.Queue(1000),
            multiprocessing.Queue(1000),
        )

    def open(self, side: int) -> None:
        """Nothing to make."""
        self.put, self.get = self._queues[side].put, self._queues[1 - side].get


class BlockingPair:
    """The four roles over a blocking channel."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel

    def wakes(self) -> int:
        """Not countable from outside."""
        return 0

    def echo(self, count: int) -> None:
        """The far end of a round trip."""
        self.channel.open(1)
        for _ in range(count):
            self.channel.put(self.channel.get())
        self._farewell()

    def ping(self, payload: bytes, count: int) -> list[int]:
        """Round-trip times in ns."""
        self.channel.open(0)
        times = []
        for _ in range(count):
            sent = time.perf_counter_ns()
            self.channel.put(payload)
            self.channel.get()
            times.append(time.perf_counter_ns() - sent)
        self.channel.put(b"")
        return times

    def _farewell(self) -> None:
        """Background threads may still be sending: leave only when the near end has said that it is done."""
        self.channel.get()

    def receive(self, count: int, ready: Callable[[], object]) -> None:
        """The far end of a stream."""
        self.channel.open(1)
        get = self.channel.get
        ready()
        for _ in range(count):
            get()
        self.channel.put(b"")
        self._farewell()

    def send(self, payload: bytes, count: int, wait_ready: Callable[[], object]) -> int:
        """Sends until the far end has everything; ns."""
        self.channel.open(0)
        put = self.channel.put
        wait_ready()
        start = time.perf_counter_ns()
        for _ in range(count):
            put(payload)
        self.channel.get()
        spent = time.perf_counter_ns() - start
        self.channel.put(b"")
        return spent


class FrameProtocol(asyncio.BufferedProtocol):
    """Length-prefixed frames, received in place; calls `on_frame` with each until `left` have come."""

    def __init__(self, left: int, on_frame: Callable[[FrameProtocol, memoryview], None]) -> None:
        self.left = left
        self.done = asyncio.Event()
        self.writable = asyncio.Event()
        self.writable.set()
        self._on_frame = on_frame
        self._buffer = bytearray(BUFFER)
        self._view = memoryview(self._buffer)
        self._filled = 0
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keeps the transport."""
        self._transport = cast(asyncio.Transport, transport)

    def pause_writing(self) -> None:
        """The socket's buffer is full."""
        self.writable.clear()

    def resume_writing(self) -> None:
        """There is room again."""
        self.writable.set()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - the interface
        """Room behind what has not been used yet."""
        return self._view[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        """Takes whole frames and moves the rest to the front."""
        self._filled += nbytes
        position = 0
        while self._filled - position >= LENGTH:
            end = position + LENGTH + int.from_bytes(self._view[position : position + LENGTH], "little")
            if end > self._filled:
                break
            self._on_frame(self, self._view[position + LENGTH : end])
            self.left -= 1
            position = end
        rest = self._filled - position
        if position and rest:
            self._buffer[:rest] = self._buffer[position : self._filled]
        self._filled = rest
        if self.left <= 0:
            self.done.set()

    def write(self, payload: bytes) -> None:
        """One frame."""
        if self._transport is None:
            raise RuntimeError("not connected")
        self._transport.write(len(payload).to_bytes(LENGTH, "little") + payload)


class SocketPair:
    """A Unix socket between two uvloop loops."""

    def __init__(self) -> None:
        self._ends = socket.socketpair()

    def wakes(self) -> int:
        """Not countable from outside."""
        return 0

    async def _open(self, side: int, left: int, on_frame: Callable[[FrameProtocol, memoryview], None]) -> FrameProtocol:
        self._ends[1 - side].close()
        protocol = FrameProtocol(left, on_frame)
        await asyncio.get_running_loop().create_unix_connection(lambda: protocol, sock=self._ends[side])
        return protocol

    def echo(self, count: int) -> None:
        """The far end of a round trip."""

        async def main() -> None:
            protocol = await self._open(1, count + 1, lambda end, frame: end.write(bytes(frame)))
            await protocol.done.wait()

        uvloop.run(main())

    def ping(self, payload: bytes, count: int) -> list[int]:
        """Round-trip times in ns."""

        async def main() -> list[int]:
            times, sent = [], 0

            def answered(end: FrameProtocol, _: memoryview) -> None:
                nonlocal sent
                now = time.perf_counter_ns()
                times.append(now - sent)
                if len(times) < count:
                    sent = time.perf_counter_ns()
                    end.write(payload)

            protocol = await self._open(0, count, answered)
            sent = time.perf_counter_ns()
            protocol.write(payload)
            await protocol.done.wait()
            protocol.write(b"")
            await asyncio.sleep(0)
            return times

        return uvloop.run(main())

    def receive(self, count: int, ready: Callable[[], object]) -> None:
        """The far end of a stream; answers when it has everything, then waits for the farewell."""

        async def main() -> None:
            def take(end: FrameProtocol, _: memoryview) -> None:
                if end.left == 2:
                    end.write(b"")

            protocol = await self._open(1, count + 1, take)
            ready()
            await protocol.done.wait()

        uvloop.run(main())

    def send(self, payload: bytes, count: int, wait_ready: Callable[[], object]) -> int:
        """Sends until the far end has everything; ns."""

        async def main() -> int:
            protocol = await self._open(0, 1, lambda *_: None)
            wait_ready()
            start = time.perf_counter_ns()
            for number in range(count):
                protocol.write(payload)
                if not protocol.writable.is_set():
                    await protocol.writable.wait()
                elif number % 64 == 63:
                    # The loop gathers what was written in one turn into one system call.
                    await asyncio.sleep(0)
            await protocol.done.wait()
            spent = time.perf_counter_ns() - start
            protocol.write(b"")
            await asyncio.sleep(0)
            return spent

        return uvloop.run(main())
