"""Every struct that crosses a ring. Token ids travel as little-endian u32 bytes: 200 times cheaper than lists at 16 k."""

from __future__ import annotations

import enum
import sys
from array import array
from collections.abc import Iterable

import msgspec

MODEL_UNKNOWN = -1
"""`PeerReq.known` of a model that has not even the prompt."""


class Kind(enum.IntEnum):
    """Record kind in the ring header: one per struct, so that the receiver picks the decoder without looking inside."""

    SUBMIT = 1
    TOKENS = 2
    ABORT = 3
    FINISH = 4
    WARM = 5
    ACTIVE = 6
    PEER_REQ = 7
    NACK = 8


class NackReason(enum.IntEnum):
    """Why a peer did not take a hand-off."""

    STALE = 1
    """It does not have the ids in front of the suffix: resend the prompt and all output."""
    FULL = 2
    """It can take nothing now: the sender keeps the request and commits its own token."""
    ERROR = 3
    """Its step failed: the sender keeps the request or fails it, by policy."""


class Sampling(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Everything that decides which token a row gives and when the answer ends; counts are per request, over all peers."""

    seed: int
    """u64; with `choice` and the output index it keys all randomness."""
    max_tokens: int
    temperature: float = 1.0
    """0 = greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 = off."""
    min_p: float = 0.0
    choice: int = 0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


class Submit(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """api -> entry worker: a new request."""

    rid: int
    """u64, never reused: the api process's epoch above a counter."""
    route: str
    """A name of the endpoint's `model` field: a configured route or a single model."""
    prompt: bytes
    """u32 token ids."""
    sampling: Sampling
    params: dict[str, float] = {}
    """Per-request overrides of the route's algorithm parameters, already range-checked."""
    score: float | None = None
    """What the api says of the whole prompt, for algorithms that decide by it."""


class TokenUpdate(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Newly committed tokens of one request, in order; the last one carries the finish."""

    rid: int
    seq: int
    """Output index of the first id: the api drops what it has already seen."""
    ids: bytes
    """u32 token ids."""
    writers: bytes
    """u8 per id: index in the route's model list of the model that wrote it."""
    finish: str = ""
    """'', 'stop', 'length', 'abort' or 'error'."""
    trim: int = 0
    """Trailing ids that end the answer and are not part of its text (EOS, stop_token_ids)."""
    handoffs: int = 0
    """Hand-offs so far, both directions."""
    error: str = ""
    """With finish = 'error': what to tell the client."""
    pending_us: int = 0
    """Microseconds spent pending so far."""
    status: int = 500
    """With finish = 'error': the HTTP status that tells the client whose fault it is (429 busy, 503 peer lost ...)."""
    forwards: tuple[int, ...] = ()
    """Per model of the route: steps with rows of this request so far."""
    drafted: int = 0
    accepted: int = 0
    """Provisional tokens of the entry so far, and those of them that were committed."""


class Tokens(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Entry worker -> api: all updates of one step in one record, which is what makes 20 k token/s cheap."""

    updates: tuple[TokenUpdate, ...]


class Abort(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """api -> entry worker, entry worker -> peers: forget this request; its finish, if any, is the sender's business."""

    rid: int


class Finish(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Entry worker -> peers: the request is over; computed pages may stay in the prefix cache."""

    rid: int


class Warm(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Entry worker -> peers at admission: prefill this prompt while the entry model decodes."""

    submit: Submit
    entry: int


class Active(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Entry worker -> peer: how many active requests of `source` have the receiver in their route (absolute, so that a lost
    or repeated one does no harm)."""

    source: int
    count: int


class PeerReq(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Worker -> worker: a hand-off, or (partial) tokens for the entry while the sender keeps the request.

    `start`, `loc` and `known` are output indices (0 = first generated token), never absolute positions, so that models whose
    prompts tokenize to different lengths can be added later.
    """

    rid: int
    source: int
    """Worker index of the sender."""
    destination: int
    """Worker index of the model that holds the request after this message; differs from the receiver only in a partial
    for the entry."""
    entry: int
    handoff_seq: int
    """Rises with every hand-off of the request; partials carry that of the hand-off that gave the sender the request."""
    start: int
    """Output index of the first id in token_ids."""
    token_ids: bytes
    """The suffix that the receiver has not seen, u32."""
    loc: int
    """Output index of the first position that the receiver may write."""
    known: tuple[int, ...]
    """Per model of the route: output tokens it knows once this message has arrived; MODEL_UNKNOWN without the prompt."""
    writers: bytes
    """u8 per id of token_ids: route index of the model that wrote it."""
    partial: bool = False
    """The sender (or `destination`) keeps the request; the entry only streams these tokens."""
    finish: str = ""
    """To the entry only: 'stop' or 'length' when the sender ended the answer, 'peer_lost' when nobody can go on with it."""
    trim: int = 0
    stall: int = 0
    """Hand-offs since the committed length last grew."""
    handoffs: int = 0
    submit: Submit | None = None
    """The whole request, sent when the receiver is not known to have it."""
    payload: bytes = b""
    """The algorithm's own."""
    scores: tuple[float, ...] = ()
    """One per draft: the last ids of token_ids, from output index `loc` on, are drafts for the receiver to verify."""
    forwards: tuple[int, ...] = ()
    """Per model of the route: steps with rows of this request, as far as the sender knows."""
    sent_ns: int = 0
    """CLOCK_MONOTONIC when sent, for the hand-off latency histogram (one clock for all processes of a host)."""


class Nack(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Receiver of a hand-off -> its sender: not taken."""

    rid: int
    source: int
    handoff_seq: int
    reason: NackReason


Message = Submit | Tokens | Abort | Finish | Warm | Active | PeerReq | Nack

_KIND_OF: dict[type, Kind] = {
    Submit: Kind.SUBMIT,
    Tokens: Kind.TOKENS,
    Abort: Kind.ABORT,
    Finish: Kind.FINISH,
    Warm: Kind.WARM,
    Active: Kind.ACTIVE,
    PeerReq: Kind.PEER_REQ,
    Nack: Kind.NACK,
}
_DECODERS: dict[int, msgspec.msgpack.Decoder[Message]] = {
    int(kind): msgspec.msgpack.Decoder(struct) for struct, kind in _KIND_OF.items()
}
_encode = msgspec.msgpack.Encoder().encode


def encode(message: Message) -> tuple[bytes, Kind]:
    """The record's payload and its kind."""
    return _encode(message), _KIND_OF[type(message)]


def decode(kind: int, payload: bytes | memoryview) -> Message:
    """The struct in a record.

    Raises:
        msgspec.DecodeError: unknown kind or a payload that is not that struct.
    """
    decoder = _DECODERS.get(kind)
    if decoder is None:
        raise msgspec.DecodeError(f"unknown record kind {kind}")
    return decoder.decode(payload)


def pack_ids(ids: Iterable[int]) -> bytes:
    """Token ids as little-endian u32 bytes.

    Raises:
        OverflowError: an id outside u32.
    """
    packed = array("I", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(data: bytes) -> array[int]:
    """The inverse of `pack_ids`.

    Raises:
        ValueError: the length is no multiple of four.
    """
    ids = array("I")
    ids.frombytes(data)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids
