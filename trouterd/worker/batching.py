"""Delayed batching's control side in a worker: which list is in force, and the verbs that ask and tell."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from trouterd.batching.report import Lists
from trouterd.config import Config
from trouterd.metrics import Family, counter, histogram
from trouterd.worker.events import Command
from trouterd.worker.gauges import gauges
from trouterd.worker.launching import DEFAULT_LINGER
from trouterd.worker.worker import Worker


class Batching:
    """Chooses between the configuration's list and the controller's."""

    def __init__(self, worker: Worker, model: str, config: Config, turn_fd: int) -> None:
        self._turn_fd = turn_fd
        self._worker = worker
        self._model = model
        self._config = config
        self._learned = Lists()
        self.handlers: dict[str, Callable[[dict[str, Any]], Awaitable[Any]]] = {
            "batching": self._show,
            "batching-report": self._report,
            "batching-lists": self._take,
            "batching-steps": self._steps,
        }
        self.configure(config)

    def configure(self, config: Config) -> None:
        """Put the configuration into force; between two steps only."""
        self._worker.turns.configure(None if config.batching.overlap else self._turn_fd)
        self._config = config
        model, mode = config.models[self._model], config.batching.mode
        thresholds = {"auto": self._learned.thresholds.get(self._model, []), "manual": model.thresholds, "eager": []}
        linger = model.linger_ms / 1e3 or self._learned.lingers.get(self._model, DEFAULT_LINGER)
        self._worker.launching.configure(thresholds[mode], linger, relax=config.batching.relax)

    def families(self) -> list[Family]:
        """Metrics of the rule, and of the time that it is about."""
        rule, own = self._worker.launching, {"model": self._model}
        reasons = [({**own, "reason": reason.value}, count) for reason, count in rule.reasons.items()]
        busy = [(own, self._worker.observer.busy_seconds)]
        return [
            counter("worker_busy_seconds", "Time in steps, from launch to results.", busy),
            counter("batching_launches", "Steps launched while more than one ready request was asked for.", reasons),
            histogram("batching_hold_seconds", "How long such a launch was held back.", [(own, rule.holds)]),
        ]

    async def _show(self, args: dict[str, Any]) -> dict[str, Any]:
        """For trouterctl: what is in force, and totals to take rates from."""
        del args
        worker, rule = self._worker, self._worker.launching
        stats = worker.stats
        return {
            "now": time.monotonic(),
            "since": stats.since,
            "mode": self._config.batching.mode,
            "thresholds": list(rule.thresholds),
            "threshold": rule.threshold,
            "linger_ms": rule.linger * 1e3,
            "active": worker.active.total,
            "reasons": {reason.value: count for reason, count in rule.reasons.items()},
            "held_seconds": rule.holds.sum,
            "queue": len(worker.scheduler.waiting),
            "running": len(worker.scheduler.running),
            "pending": gauges(worker)["requests_pending"],
            "tokens": stats.tokens,
            "handoffs": stats.handoffs.total(),
            "steps": stats.steps,
            "busy_seconds": worker.observer.busy_seconds,
            "waited": worker.observer.waited,
            "waited_seconds": worker.observer.waited_seconds,
            "handed": worker.observer.handed,
            "handed_seconds": worker.observer.handed_seconds,
            "step_requests": stats.batch_requests.sum,
        }

    async def _report(self, args: dict[str, Any]) -> Any:
        """For the controller."""
        del args
        worker = self._worker
        return msgspec.to_builtins(worker.observer.report(time.monotonic(), worker.active.total, self._learned.version))

    async def _steps(self, args: dict[str, Any]) -> Any:
        """For measurements: the latest steps, which the controller still gets."""
        return msgspec.to_builtins(self._worker.observer.since(float(args["since"])))

    async def _take(self, args: dict[str, Any]) -> None:
        """The controller's lists, in force from the next step on."""
        lists = msgspec.convert(args, Lists)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def apply() -> None:
            self._learned = lists
            self.configure(self._config)
            done.set_result(None)

        self._worker.deliver(Command(apply))
        await done
