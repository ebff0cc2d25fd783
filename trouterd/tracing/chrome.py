"""Chrome trace events, which chrome://tracing and ui.perfetto.dev show: one process per model.

Format: "Trace Event Format" of the Chromium project, JSON object form. Times are microseconds from the beginning of the trace.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trouterd.tracing.events import Event, Handoff, Idle, Mark, Queues, State, Step, Work

MODEL, LOOP, SENT = 1, 2, 3
"""Rows of a process: what the model does, what the decode loop does, hand-offs that it sent."""
_ROWS = {MODEL: "model", LOOP: "decode loop", SENT: "hand-offs sent"}
_IDLE = {
    State.LOOP: "waits for the loop",
    State.HELD: "held by delayed batching or turns",
    State.NO_ROOM: "no room in the KV pool",
    State.NOTHING: "nothing ready",
}
_SENDING = 0.5
"""Length of the slice that a hand-off's arrow starts from, microseconds: an arrow needs one."""

Json = dict[str, Any]


def chrome(events: Mapping[str, Sequence[Event]], workers: Sequence[str], begin: float) -> Iterator[Json]:
    """The trace events of a recording.

    Args:
        events: by model.
        workers: all models by worker index.
        begin: when the trace began, seconds of CLOCK_MONOTONIC.
    """
    for name in events:
        pid = workers.index(name) + 1
        yield _meta("process_name", pid, 0, {"name": name})
        yield _meta("process_sort_index", pid, 0, {"sort_index": pid})
        for row, title in _ROWS.items():
            yield _meta("thread_name", pid, row, {"name": title})
            yield _meta("thread_sort_index", pid, row, {"sort_index": row})
    arrow = 0
    for name, recorded in events.items():
        model = _Model(workers.index(name) + 1, begin)
        for event in recorded:
            if not isinstance(event, Handoff):
                yield model.json(event)
            # Without its sender's part, or from before it, there is nothing to draw it from.
            elif workers[event.source] in events and event.sent >= begin:
                arrow += 1
                yield from model.arrow(event, arrow, workers)


class _Model:
    """Writes one model's events."""

    def __init__(self, pid: int, begin: float) -> None:
        self._pid = pid
        self._begin = begin

    def json(self, event: Step | Idle | Work | Queues | Mark) -> Json:
        match event:
            case Step():
                return self._step(event)
            case Idle(state=state, begin=begin, end=end):
                return self._slice(_IDLE[state], MODEL, begin, end, {})
            case Work(name=name, begin=begin, end=end):
                return self._slice(name, LOOP, begin, end, {})
            case Queues(time=time, running=running, away=away, waiting=waiting):
                counts = {"running": running, "away": away, "waiting": waiting}
                return self._at(time) | {"ph": "C", "name": "requests", "args": counts}
            case Mark(name=name, time=time, count=count):
                at = self._at(time) | {"tid": MODEL}
                return at | {"ph": "i", "s": "p", "name": name, "args": {"requests": count}}

    def arrow(self, event: Handoff, number: int, workers: Sequence[str]) -> Iterator[Json]:
        """From a slice of its own at the sender to the step at the receiver."""
        sender = self._at(event.sent) | {"pid": event.source + 1, "tid": SENT}
        wait = (event.launched - event.sent) * 1e6
        args = {"request": event.request, "until_launch_us": _rounded(wait)}
        same = {"cat": "hand-off", "name": "hand-off", "id": number}
        yield sender | {"ph": "X", "name": f"to {workers[self._pid - 1]}", "dur": _SENDING, "args": args}
        yield sender | same | {"ph": "s"}
        yield self._at(event.begin) | same | {"tid": MODEL, "ph": "f", "bp": "e"}

    def _step(self, step: Step) -> Json:
        args = {
            "requests": step.requests,
            "rows": step.rows,
            "prefill_rows": step.prefill,
            "arrived_by_handoff": step.arrived,
            "alive": step.alive,
            "handed_over": step.leaving,
            "device_seconds": step.device,
            "launched_by": step.reason,
            "B": step.threshold,
            "ready": step.ready,
            "queued_behind": step.queued,
            "launched_before_us": _rounded((step.begin - step.launched) * 1e6),
        }
        name = "prefill step" if step.prefill else "step"
        return self._slice(name, MODEL, step.begin, step.end, args)

    def _slice(self, name: str, row: int, begin: float, end: float, args: Json) -> Json:
        length = _rounded((end - begin) * 1e6)
        return self._at(begin) | {"tid": row, "ph": "X", "name": name, "dur": length, "args": args}

    def _at(self, time: float) -> Json:
        return {"pid": self._pid, "ts": _rounded((time - self._begin) * 1e6)}


def _meta(name: str, pid: int, row: int, args: Json) -> Json:
    return {"ph": "M", "name": name, "pid": pid, "tid": row, "args": args}


def _rounded(microseconds: float) -> float:
    return round(microseconds, 3)
