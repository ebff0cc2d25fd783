"""The supervisor's side of `trouterctl trace`: one at a time, of all workers or some."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from trouterd.calls import CallError, Refused
from trouterd.supervisor.fleet import Fleet
from trouterd.tracing.events import LEAST_SECONDS, MOST_SECONDS

ABANDONED = 5.0
"""Seconds after which one who asks nothing any more is taken to be gone."""
audit = logging.getLogger("trouterd.audit")


class Tracing:
    """Handlers of its verbs. Whoever has begun a trace asks again and again (`trace-left`), or it ends."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._number = 0
        """Of the latest trace."""
        self._models: list[str] = []
        """Of the running or unread trace."""
        self._who = ""
        self._ends = 0.0
        """time.monotonic() at which the workers stop recording."""
        self._alarm: asyncio.TimerHandle | None = None
        self._ending: asyncio.Task[Any] | None = None
        self.handlers: dict[str, Callable[[dict[str, Any], str], Awaitable[Any]]] = {
            "trace": self._start,
            "trace-left": self._left,
            "trace-stop": self._stop,
            "trace-read": self._read,
            "trace-end": self._end,
        }

    async def _start(self, args: dict[str, Any], who: str) -> dict[str, Any]:
        """Have the workers record for a while; what went wrong by model, '' where nothing did."""
        seconds, models = self._checked(args)
        if self._models:
            raise Refused(f"{self._who} is tracing already ({', '.join(self._models)}); one trace at a time")
        self._number += 1
        self._models, self._who, self._ends = models, who, time.monotonic() + seconds
        self._alive()
        audit.info("trace of %s for %g s by %s", ", ".join(models), seconds, who)
        answers = await self._ask("trace", models, {"seconds": seconds})
        return {"trace": self._number, "models": answers, "workers": list(self._fleet.config.models)}

    async def _left(self, args: dict[str, Any], who: str) -> float:
        """Seconds until the recording ends."""
        self._check(args, who)
        return max(self._ends - time.monotonic(), 0.0)

    async def _stop(self, args: dict[str, Any], who: str) -> dict[str, Any]:
        """Summaries by model; a recording that still runs ends now."""
        self._check(args, who)
        return await self._ask("trace-stop", self._models, {"keep": True})

    async def _read(self, args: dict[str, Any], who: str) -> Any:
        """The next events of one model; `{"error": ...}` if its worker has them no more."""
        self._check(args, who)
        model = args.get("model")
        if model not in self._models:
            raise Refused(f"trace {self._number} has no model {model!r}")
        answers = await self._ask("trace-read", [model], {})
        return answers[model]

    async def _end(self, args: dict[str, Any], who: str) -> None:
        """Everything that was wanted has been read. A trace that is over already needs no end: writing a long one takes a while."""
        if self._is_own(args, who):
            await self._forget()

    def _checked(self, args: dict[str, Any]) -> tuple[float, list[str]]:
        seconds, known = args.get("seconds"), list(self._fleet.config.models)
        if not isinstance(seconds, int | float) or not LEAST_SECONDS <= seconds <= MOST_SECONDS:
            raise Refused(f"seconds: expected a number from {LEAST_SECONDS:g} to {MOST_SECONDS:g}, got {seconds!r}")
        wanted = args.get("models") or known
        if not isinstance(wanted, list) or not all(isinstance(name, str) for name in wanted):
            raise Refused("models: expected a list of names")
        if unknown := [name for name in wanted if name not in known]:
            raise Refused(f"no model {unknown[0]!r}; there are {', '.join(known)}")
        return float(seconds), [name for name in known if name in wanted]

    def _is_own(self, args: dict[str, Any], who: str) -> bool:
        return bool(self._models) and args.get("trace") == self._number and who == self._who

    def _check(self, args: dict[str, Any], who: str) -> None:
        if not self._is_own(args, who):
            raise Refused(f"trace {args.get('trace')} is over, or somebody else's")
        self._alive()

    def _alive(self) -> None:
        self._silence()
        self._alarm = asyncio.get_running_loop().call_later(ABANDONED, self._abandon)

    def _silence(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()

    def _abandon(self) -> None:
        audit.info("trace by %s ended: nobody asks for it any more", self._who)
        self._ending = asyncio.create_task(self._forget())

    async def _forget(self) -> None:
        """Let the workers drop what is left."""
        self._silence()
        models, self._models = self._models, []
        await self._ask("trace-stop", models, {"keep": False})

    async def _ask(self, verb: str, models: Iterable[str], args: dict[str, Any]) -> dict[str, Any]:
        """Every worker's answer by model; `{"error": ...}` for one that gave none."""
        number = self._number

        async def ask(model: str) -> Any:
            try:
                return await self._fleet.workers[model].call(verb, args | {"trace": number})
            except (CallError, Refused) as error:
                return {"error": str(error)}

        asked = list(models)
        return dict(zip(asked, await asyncio.gather(*map(ask, asked)), strict=True))
