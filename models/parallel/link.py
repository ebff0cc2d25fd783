"""What the first rank of a split model tells the others and what they answer: msgpack frames on a pair of sockets.

Frames of a step are a few dozen bytes; what the step's rows hold goes from device to device (`models.parallel.exchange`).
"""

from __future__ import annotations

import contextlib
import socket
import struct
from typing import Literal, TypeVar

import msgspec

MAX_FRAME = 16 << 20
"""Bytes; the runs of a step take 32 each."""
_LENGTH = struct.Struct("<I")


class Layout(msgspec.Struct, frozen=True):
    """Shapes of a step's rows on the first rank."""

    rows: int
    logit_rows: int
    slots: int
    """Rows of the page table."""
    pages: int
    """Columns of the page table."""


class Load(msgspec.Struct, frozen=True, tag=True):
    """Load your part of the model. Answer: Loaded."""

    rank: int
    world: int
    path: str
    device: str
    dtype: str
    load_format: str
    page_size: int
    vocab_size: int | None
    context_length: int | None
    ragged_prefill: bool
    """FlashInfer may run long prompts."""
    sm_percent: int = 0
    """To which MPS limits each rank; 0: to nothing."""
    step_rows: tuple[int, ...] = ()
    """Row counts of steps that products are tried with under such a limit."""


class Join(msgspec.Struct, frozen=True, tag=True):
    """Meet the other ranks. Answer: Done."""

    store_fd: int
    """An empty file that all ranks share, as an inherited descriptor."""


class Allocate(msgspec.Struct, frozen=True, tag=True):
    """Make room for K and V of so many pages; captured graphs are gone. Answer: Done."""

    pages: int


class Look(msgspec.Struct, frozen=True, tag=True):
    """Call this method of your `models.memory.DeviceMemory`. Answer: Bytes."""

    at: Literal["held", "start_peak", "peak", "free_and_total"]


class Step(msgspec.Struct, frozen=True, tag=True):
    """Run a step."""

    layout: Layout
    runs: bytes | None
    """[4, G] int64: `models.rows.Runs`, field by field."""


class Capture(msgspec.Struct, frozen=True, tag=True):
    """Capture a step of this layout as a graph, unless there is one of so many rows and logit rows."""

    layout: Layout


class Replay(msgspec.Struct, frozen=True, tag=True):
    """Run a captured step."""

    rows: int
    logit_rows: int


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The part is on the device."""

    weight_bytes: int
    kv_bytes_per_page: int


class Bytes(msgspec.Struct, frozen=True, tag=True):
    """What the method gave: zeros for nothing."""

    first: int = 0
    second: int = 0


class Done(msgspec.Struct, frozen=True, tag=True):
    """It is as you asked."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """What was asked cannot be, because of the model, the settings or the device; the rank is as it was."""

    message: str
    """One line."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A rank's last words."""

    message: str
    """One line."""


Order = Load | Join | Allocate | Look | Step | Capture | Replay
Answer = Loaded | Bytes | Done | Refused | Failed
_encoder = msgspec.msgpack.Encoder()
_T = TypeVar("_T")


class LinkError(Exception):
    """A frame that is too long or not one of ours."""


class Link:
    """One end of a pair of connected sockets; a frame is a u32 little-endian length and msgpack. End of file says that the peer
    is gone."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._orders = msgspec.msgpack.Decoder(Order)
        self._answers = msgspec.msgpack.Decoder(Answer)
        self._received = b""
        """What follows the frames that were taken."""

    @staticmethod
    def pair() -> tuple[socket.socket, socket.socket]:
        """Two connected sockets for two links."""
        ours, theirs = socket.socketpair()
        return ours, theirs

    def send(self, frame: Order | Answer) -> None:
        """Send a frame.

        Raises:
            LinkError: it is too long.
            OSError: the peer is gone.
        """
        body = _encoder.encode(frame)
        if len(body) > MAX_FRAME:
            raise LinkError(f"a {type(frame).__name__} of {len(body)} bytes; at most {MAX_FRAME}")
        self._sock.sendall(_LENGTH.pack(len(body)) + body)

    def order(self) -> Order | None:
        """The next order, or None at end of file. Raises LinkError."""
        body = self._receive()
        return self._decode(self._orders, body) if body else None

    def answer(self) -> Answer | None:
        """The next answer, or None at end of file. Raises LinkError."""
        body = self._receive()
        return self._decode(self._answers, body) if body else None

    def hang_up(self) -> None:
        """Let go of the peer: both ends find the end of file, also where a thread waits for the other end."""
        with contextlib.suppress(OSError):  # it is gone already
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Hang up, and free the socket. No other thread may be using it: its number may be another file's at once."""
        self.hang_up()
        self._sock.close()

    def _receive(self) -> bytes:
        """The next frame's bytes, or none at end of file."""
        if not self._have(_LENGTH.size):
            return b""
        length: int = _LENGTH.unpack_from(self._received)[0]
        if length > MAX_FRAME:
            raise LinkError(f"a frame of {length} bytes; at most {MAX_FRAME}")
        end = _LENGTH.size + length
        if not self._have(end):
            return b""
        body, self._received = self._received[_LENGTH.size : end], self._received[end:]
        return body

    def _have(self, size: int) -> bool:
        """Wait for so many bytes; False at end of file."""
        while len(self._received) < size:
            try:
                piece = self._sock.recv(1 << 16)
            except ConnectionResetError:
                return False
            if not piece:
                return False
            self._received += piece
        return True

    def _decode(self, decoder: msgspec.msgpack.Decoder[_T], body: bytes) -> _T:
        try:
            return decoder.decode(body)
        except msgspec.DecodeError as error:
            raise LinkError(f"undecodable frame of {len(body)} bytes: {error}") from error
