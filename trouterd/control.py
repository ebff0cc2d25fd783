"""Frames between the supervisor and its children, and between trouterctl and the supervisor.

One socketpair (children) or unix stream socket (trouterctl); each frame is a u32 little-endian length and a msgpack-encoded,
tagged msgspec struct. End of file on a child's socketpair means that the supervisor is gone.
"""

from __future__ import annotations

import socket
import struct
from typing import TYPE_CHECKING, Any

import msgspec

from trouterd.config import Config

if TYPE_CHECKING:  # trouterctl speaks the protocol without an event loop, whose import would double its start
    import asyncio

MAX_FRAME = 16 << 20
_LENGTH = struct.Struct("<I")


class Link(msgspec.Struct, frozen=True, tag=True):
    """One ring as inherited descriptors."""

    peer: str
    """Name of the process at the other end: 'api' or a model's name."""
    ring_fd: int
    data_event_fd: int
    space_event_fd: int


class Boot(msgspec.Struct, frozen=True, tag=True):
    """Supervisor -> child, first frame: everything it needs."""

    role: str
    """'api' or a model's name."""
    epoch: int
    """1 at the first start, +1 at every restart of this role."""
    config: Config
    inbound: list[Link]
    """Rings that this process consumes."""
    outbound: list[Link]
    """Rings that this process produces into."""
    listen_fds: list[int] = []
    """api only: listening sockets, already bound."""
    turn_fd: int = -1
    """Workers only: the file whose locks say whose turn it is (`trouterd.worker.turn`)."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Child -> supervisor: serving; `detail` says what it holds (model size, KV tokens, vocabulary ...)."""

    detail: dict[str, Any] = {}


class Fatal(msgspec.Struct, frozen=True, tag=True):
    """Child -> supervisor: cannot start and a restart would not help (bad weights, tokenizers that differ)."""

    message: str


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Supervisor -> child, every heartbeat."""

    number: int


class Pong(msgspec.Struct, frozen=True, tag=True):
    """Child -> supervisor."""

    number: int
    steps: int = 0
    """Forward passes so far."""
    step_seconds: float = 0.0
    """How long the step in progress has been running; 0 when none is."""


class PeerState(msgspec.Struct, frozen=True, tag=True):
    """Supervisor -> every other child: the state of one process."""

    name: str
    state: str
    """'up', 'stalled' or 'down'."""
    epoch: int
    pid: int = 0
    process_state: str = ""
    """Letter from /proc/PID/stat when stalled (T = stopped, D = disk wait ...)."""


class Call(msgspec.Struct, frozen=True, tag=True):
    """A request for one verb: trouterctl -> supervisor, supervisor <-> child. Verbs: status, models, requests, set, abort,
    drain, metrics, flush-cache, batching, trace and its parts (`supervisor/tracing.py`); between supervisor and workers also
    kv-tokens and gpu-memory (`trouterd.memory`)."""

    id: int
    verb: str
    args: dict[str, Any] = {}


class Reply(msgspec.Struct, frozen=True, tag=True):
    """The answer to a Call."""

    id: int
    result: Any = None
    error: str = ""
    refused: bool = False
    """True: understood and refused (not live, out of range); the old value stays."""


Frame = Boot | Ready | Fatal | Ping | Pong | PeerState | Call | Reply
_decoder = msgspec.msgpack.Decoder(Frame)
_encoder = msgspec.msgpack.Encoder()


class ControlError(Exception):
    """A frame that is too long or not one of ours."""


async def read_frame(reader: asyncio.StreamReader) -> Frame | None:
    """The next frame, or None at end of file.

    Raises:
        ControlError: oversized or undecodable frame.
    """
    try:
        body = await reader.readexactly(_body_length(await reader.readexactly(_LENGTH.size)))
    except (EOFError, ConnectionResetError):
        return None
    return _decode(body)


def receive_frame(link: socket.socket) -> Frame | None:
    """The same from a blocking socket."""
    header = _receive_exactly(link, _LENGTH.size)
    body = _receive_exactly(link, _body_length(header)) if header else b""
    return _decode(body) if body else None


def _receive_exactly(link: socket.socket, size: int) -> bytes:
    """`size` bytes, or none at end of file."""
    data = b""
    while len(data) < size:
        piece = link.recv(size - len(data))
        if not piece:
            return b""
        data += piece
    return data


def _body_length(header: bytes) -> int:
    length: int = _LENGTH.unpack(header)[0]
    if length > MAX_FRAME:
        raise ControlError(f"control frame of {length} bytes; at most {MAX_FRAME}")
    return length


def _decode(body: bytes) -> Frame:
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ControlError(f"undecodable control frame: {error}") from error


def pack_frame(frame: Frame) -> bytes:
    """The bytes of one frame."""
    body = _encoder.encode(frame)
    return _LENGTH.pack(len(body)) + body
