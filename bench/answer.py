"""One streamed answer as a client sees it come: when tokens arrive, how many, and what its usage says."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

_EVENT = b'data: {"'
"""An event with content. In JSON a quote inside of a text is escaped, so that no text contains this."""
_NO_CHOICES = b'"choices":[]'
_TEXTS = ("text", "content", "reasoning_content", "reasoning")


class AnswerError(Exception):
    """The stream said that the answer has failed, or was none."""


@dataclass(slots=True)
class Log:
    """What all clients see while it is open."""

    open: bool = False
    first: list[float] = field(default_factory=list)
    """Seconds from a request to its first token; by when that came."""
    gaps: list[float] = field(default_factory=list)
    """Seconds between two arrivals of tokens of one answer, however many tokens came."""
    whole: list[float] = field(default_factory=list)
    """Seconds from a request to the end of its answer, where that was whole."""

    def clear(self) -> None:
        """Forget what was seen."""
        for seen in (self.first, self.gaps, self.whole):
            seen.clear()


class Answer:
    """Takes the pieces of a stream's body (`Connection.ask`).

    Looks into events only where it must: into the first ones, and into the newest one when asked for the usage.

    Args:
        log: of all clients.
        keep: whether text and token ids are wanted.
        whole: False where only the rest of an answer is asked for: it takes less time than an answer.
        begun: called at the first token.
    """

    def __init__(
        self, log: Log, *, keep: bool = False, whole: bool = True, begun: Callable[[], object] | None = None
    ) -> None:
        self._log = log
        self._whole = whole
        self._on_first = begun
        self.begun = time.perf_counter()
        self.first = 0.0
        """When its first token came; 0: it has not. Seconds of time.perf_counter, as `begun`."""
        self.events = 0
        """That carried tokens."""
        self.tokens: int | None = None
        """How many it has; known at its end."""
        self._last = 0.0
        self._rest = b""
        """Of an event whose end has not come."""
        self._newest = b""
        """The latest events."""
        self._kept: list[bytes] | None = [] if keep else None
        self._no_choices = _NO_CHOICES
        self._fault: AnswerError | None = None
        self.counted_early = False
        """Whether its first token came with a usage."""

    def receive(self, piece: bytes, now: float) -> None:
        """Take a piece of the body that came at `now`."""
        events = self._complete(piece)
        count = events.count(_EVENT)
        if not count:
            return  # part of an event, a comment, or the end of the stream
        self._newest = events
        if self._kept is not None:
            self._kept.append(events)
        if not self.first:
            self._begin(now)
            return
        count -= events.count(self._no_choices)
        if count > 0:
            self.events += count
            if self._log.open:
                self._log.gaps.append(now - self._last)
            self._last = now

    def usage(self) -> Mapping[str, Any] | None:
        """The newest one; None while none has come."""
        return next(
            (u for event in reversed([*_parsed(self._newest)]) if isinstance(u := event.get("usage"), dict)), None
        )

    def end(self) -> None:
        """The body is complete.

        Raises:
            AnswerError: it ended with an error, or held no answer.
        """
        if self._fault is not None:
            raise self._fault
        for event in _parsed(self._newest):
            if "error" in event:
                error = event["error"]
                raise AnswerError(str(error.get("message", error) if isinstance(error, dict) else error))
        usage = self.usage()
        self.tokens = usage["completion_tokens"] if usage else self.events
        if not self.tokens:
            raise AnswerError(f"no tokens in the stream: {(self._newest or self._rest)[:200]!r}")
        if self._log.open and self._whole:
            self._log.whole.append(time.perf_counter() - self.begun)

    def token_ids(self) -> list[int]:
        """Where the server gives them; needs `keep`."""
        return [token for choice in self._choices() for token in choice.get("token_ids") or ()]

    def text(self) -> str:
        """Needs `keep`."""
        pieces = ((choice.get("delta") or choice) for choice in self._choices())
        return "".join(str(piece[name]) for piece in pieces for name in _TEXTS if piece.get(name))

    def _choices(self) -> Iterator[Mapping[str, Any]]:
        for events in self._kept or ():
            for event in _parsed(events):
                yield from event.get("choices") or ()

    def _complete(self, piece: bytes) -> bytes:
        """The complete events up to now, without those that were taken before."""
        if piece.endswith(b"\n\n") and not self._rest:
            return piece
        # Line ends may be CR LF. In JSON a CR is escaped.
        piece = piece.replace(b"\r", b"")
        whole, separator, self._rest = (self._rest + piece).rpartition(b"\n\n")
        return whole + separator

    def _begin(self, now: float) -> None:
        """Note the first token, if there is one in the newest events: some servers begin with the role alone."""
        try:
            carry = [event for event in _parsed(self._newest) if _has_token(event)]
        except AnswerError as error:
            self._fault = error
            return
        self.events = len(carry)
        if b'": ' in self._newest[:40]:
            self._no_choices = _NO_CHOICES.replace(b":", b": ")
        if carry:
            self.first = self._last = now
            self.counted_early = bool(carry[0].get("usage"))
            if self._on_first is not None:
                self._on_first()
            if self._log.open:
                self._log.first.append(now - self.begun)


def _parsed(events: bytes) -> Iterator[dict[str, Any]]:
    for event in events.split(b"\n\n"):
        _, found, data = event.partition(b"data:")
        if found and data.lstrip().startswith(b"{"):
            try:
                content = json.loads(data)
            except ValueError:
                raise AnswerError(f"an event that is no JSON: {data[:200]!r}") from None
            yield content


def _has_token(event: Mapping[str, Any]) -> bool:
    for choice in event.get("choices") or ():
        piece = choice.get("delta") or choice
        if choice.get("token_ids") or any(piece.get(name) for name in _TEXTS):
            return True
        if (event.get("usage") or {}).get("completion_tokens"):
            return True
    return False
