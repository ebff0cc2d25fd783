"""What the decode loop asks of whoever runs its steps: launch one, see what the oldest one decided, say when to look again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from trouterd.worker.request import Request
from trouterd.worker.scheduler import Chunk

NEVER = float("inf")


@dataclass(slots=True)
class Outcome:
    """What a step decided; the lists are in the order of the chunks that wanted logits."""

    chunks: Sequence[Chunk]
    alive: Sequence[bool]
    """The row was fed: its request had not left in a step before this one."""
    tokens: Sequence[int]
    """NO_TOKEN where only a part of the drafts has been read, and accepted."""
    destinations: Sequence[int]
    """0 = stay, k = the k-th other model of the route, FAILED."""
    stays: Sequence[bool]
    """The device goes on with this token unasked: a row behind it counts."""
    seconds: float
    accepted: Sequence[int] = ()
    """Per row: drafts that are accepted in front of the token. Empty where nobody drafts, as on a device."""
    scores: Sequence[float] = ()
    """Per row: the score of the token as a draft. Empty like `accepted`."""

    @property
    def rows(self) -> int:
        """Rows that were fed."""
        return sum(chunk.count for chunk in self.chunks) - len(self.alive) + sum(self.alive)


class Stepper(Protocol):
    """Runs chunks on a model, in the order in which they are launched."""

    @property
    def steps(self) -> int:
        """Steps that have ended."""
        ...

    @property
    def started(self) -> float:
        """time.monotonic() at which the oldest step in flight began; 0 when none is."""
        ...

    @property
    def in_flight(self) -> int:
        """Steps launched whose outcome has not been taken."""
        ...

    @property
    def running(self) -> int:
        """Those of them that the device does not skip: some request of theirs has not left, as far as is known."""
        ...

    def hosted(self, request: Request) -> bool:
        """Whether the host has to decide this request's tokens while the others' are decided by a device."""
        ...

    def launch_at(self, hosted: bool) -> float:
        """time.monotonic() from which on the next step should be planned: 0 = at once, NEVER = not before the oldest one has ended.

        Args:
            hosted: a request is here whose tokens the host decides.
        """
        ...

    def worthwhile(self, chunks: Sequence[Chunk]) -> bool:
        """Whether to launch these now: not a step all of whose rows wait for tokens of requests that tend to leave, where the time
        that it takes for nothing then outweighs the gap that it fills otherwise."""
        ...

    async def launch(self, chunks: Sequence[Chunk], meanwhile: Callable[[], None]) -> None:
        """Queue a step. Whatever the model raises comes out of here; the step has not been launched then.

        Args:
            chunks: what is fed.
            meanwhile: called at most once, in this thread; by steppers that return only when the step has ended, once it runs.
        """
        ...

    def poll(self) -> Outcome | None:
        """What the oldest step in flight has decided, or None while it runs. Never blocks; whatever it raises means that the
        device is lost."""
        ...

    def nap(self, now: float) -> float:
        """Seconds that may be slept before the oldest step is worth another look; 0 = look at once."""
        ...
