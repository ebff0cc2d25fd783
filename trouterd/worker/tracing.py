"""The worker's side of `trouterctl trace`: begins and ends a recording, and gives its events out in small frames."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from trouterd.calls import Refused
from trouterd.tracing.events import Summary
from trouterd.worker.recorder import Recorder
from trouterd.worker.worker import Worker

FRAME = 2048
"""Events of one frame: some 80 kB, packed in less than a millisecond."""
KEPT = 30.0
"""Seconds for which an ended recording waits to be read on."""


class Tracing:
    """At most one recording, running or ended. It ends and is forgotten by itself, whatever becomes of the one who asked for it."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._number = 0
        """Of the recording, as the supervisor counts; 0: there is none."""
        self._recorder: Recorder | None = None
        self._summary: Summary | None = None
        """Of the ended recording."""
        self._alarm: asyncio.TimerHandle | None = None
        self.handlers: dict[str, Callable[[dict[str, Any]], Awaitable[Any]]] = {
            "trace": self._start,
            "trace-stop": self._stop,
            "trace-read": self._read,
        }

    async def _start(self, args: dict[str, Any]) -> None:
        """Record for `seconds`, in place of whatever was recorded before."""
        worker = self._worker
        self._forget()
        self._number = args["trace"]
        self._recorder = worker.recorder = Recorder(
            worker.scheduler, worker.launching, worker.stats, in_flight=worker.busy
        )
        self._after(args["seconds"], self._end)

    async def _stop(self, args: dict[str, Any]) -> Any:
        """The summary; a recording that still runs ends now. `keep`: the events will be read."""
        self._of(args)
        self._end()
        summary = msgspec.to_builtins(self._summary)
        if not args["keep"]:
            self._forget()
        return summary

    async def _read(self, args: dict[str, Any]) -> dict[str, Any]:
        """The next events, and how many are left."""
        log = self._of(args).log
        self._end()
        events = log.take(FRAME)
        if log:
            self._after(KEPT, self._forget)
        else:
            self._forget()
        return {"events": events, "left": len(log)}

    def _of(self, args: dict[str, Any]) -> Recorder:
        if self._recorder is None or self._number != args["trace"]:
            raise Refused(
                f"trace {args['trace']} is not here: the process was restarted, or the trace not read in time"
            )
        return self._recorder

    def _end(self) -> None:
        if self._recorder is not None and self._summary is None:
            self._worker.recorder = None
            self._summary = self._recorder.finish()
            self._after(KEPT, self._forget)

    def _forget(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._worker.recorder = self._recorder = self._summary = self._alarm = None
        self._number = 0

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = asyncio.get_running_loop().call_later(seconds, action)
