"""What a worker records of its decode loop: counts and times, never ids or text of a request's tokens.

Times are seconds of CLOCK_MONOTONIC, one clock for all processes of a host.
"""

from __future__ import annotations

from enum import Enum

import msgspec

MOST_SECONDS = 60.0
"""Of one recording."""
LEAST_SECONDS = 0.1


class State(Enum):
    """What a model does; at every moment one of these."""

    STEP = "step"
    """A step has been launched, and its outcome has not been seen."""
    LOOP = "loop"
    """Requests are ready, and the decode loop has not come to launch them yet."""
    HELD = "held"
    """Requests are ready, and delayed batching waits for more; with `batching.overlap = false` also: it is another model's turn."""
    NO_ROOM = "no_room"
    """Requests are here, and the KV pool has no room for their next rows."""
    NOTHING = "nothing_ready"
    """No request is ready."""


class Step(msgspec.Struct, array_like=True, frozen=True, gc=False, tag="step"):
    """One forward pass."""

    launched: float
    begin: float
    """When it was launched, or when the step before it was seen to have ended."""
    end: float
    """When its outcome was seen."""
    device: float
    """Seconds that the device says it took; 0 if it has not ended."""
    requests: int
    rows: int
    prefill: int
    """Rows of prompts whose logits nobody wants."""
    arrived: int
    """Requests that a hand-off has brought since they last were in a step here."""
    alive: int
    """Requests that it gave a token."""
    leaving: int
    """Of these, those that it hands over."""
    reason: str
    """Why it was launched (`trouterd.batching.launch.Reason`); 'none' where nothing is waited for."""
    threshold: int
    """B in force."""
    ready: int
    """Requests that were ready; 0 where nothing is waited for."""
    queued: int
    """Steps in flight when it was launched."""


class Idle(msgspec.Struct, array_like=True, frozen=True, gc=False, tag="idle"):
    """A while without a step."""

    state: State
    begin: float
    end: float


class Work(msgspec.Struct, array_like=True, frozen=True, gc=False, tag="work"):
    """What the decode loop did: 'launch' (a step), 'outcome' (from seeing one until it was ready to launch again) or 'events' (the
    same from being woken)."""

    name: str
    begin: float
    end: float


class Handoff(msgspec.Struct, array_like=True, frozen=True, gc=False, tag="handoff"):
    """A hand-off whose first step has been launched here."""

    request: int
    source: int
    """Worker index of its sender."""
    sent: float
    launched: float
    begin: float
    """Of that step."""


class Queues(msgspec.Struct, array_like=True, frozen=True, gc=False, tag="queues"):
    """Requests by where they are, from now on."""

    time: float
    running: int
    away: int
    waiting: int


class Mark(msgspec.Struct, array_like=True, frozen=True, gc=False, tag="mark"):
    """So many requests were 'admitted', 'finished' or 'preempted'."""

    name: str
    time: float
    count: int


Event = Step | Idle | Work | Handoff | Queues | Mark


class Summary(msgspec.Struct, frozen=True):
    """A whole recording of one model, also of what the ring of events has lost."""

    begin: float
    end: float
    steps: int
    """That ended."""
    tokens: int
    alive: int
    """Sum over steps of the requests that got a token."""
    spent: dict[str, float]
    """Seconds by State; they add up to the whole time."""
    busy: float
    """Of the seconds in steps, those in which the device worked."""
    prefill: float
    """Of these, those of steps that fed prompts."""
    handoffs: int
    """That arrived."""
    latencies: tuple[float, float]
    """Median and 99th percentile of the time from a hand-off's sending to the launch of its step, seconds; 0 without any."""
    events: int
    """That can be read."""
    dropped: int
    """Older ones that the ring had no room for."""

    @property
    def seconds(self) -> float:
        """How long was recorded."""
        return self.end - self.begin

    @property
    def shares(self) -> dict[str, float]:
        """Of the whole time, 1 in all: by State, with `busy` and `overhead` (launching a step, noticing its end) for STEP."""
        spent = dict(self.spent)
        in_steps = spent.pop(State.STEP.value)
        parts = {"busy": self.busy, "overhead": in_steps - self.busy, **spent}
        return {name: seconds / self.seconds if self.seconds else 0.0 for name, seconds in parts.items()}


EVENTS = msgspec.msgpack.Decoder(list[Event])
