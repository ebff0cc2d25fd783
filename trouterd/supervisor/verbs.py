"""What trouterctl and the api may ask of the supervisor."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any

import msgspec

from trouterd import __version__, logs
from trouterd.calls import CallError, Refused
from trouterd.consistency import live_problems
from trouterd.settings import ConfigError, set_value
from trouterd.supervisor.fleet import API, Fleet
from trouterd.supervisor.process import Child, resident_bytes
from trouterd.supervisor.tracing import Tracing

SCRAPE_TIMEOUT = 1.0
"""Seconds that a child gets for status and metrics: a stalled one must not hold up the answer about all others."""
log = logging.getLogger("trouterd.supervisor")
audit = logging.getLogger("trouterd.audit")


class Verbs:
    """Handlers by verb."""

    def __init__(self, fleet: Fleet, addresses: Callable[[], list[str]], drain: Callable[[str], None]) -> None:
        """
        Args:
            fleet: the children.
            addresses: where the HTTP API listens.
            drain: called to stop the daemon, with who asked; once it stops it may be called again.
        """
        self._fleet = fleet
        self._addresses = addresses
        self._drain = drain
        self._started = time.monotonic()
        self._setting = asyncio.Lock()
        self._handlers: dict[str, Callable[[dict[str, Any], str], Awaitable[Any]]] = {
            "status": self._status,
            "models": self._models,
            "requests": self._requests,
            "metrics": self._metrics,
            "set": self._set,
            "abort": self._abort,
            "drain": self._begin_drain,
            "flush-cache": self._flush_cache,
            "batching": self._batching,
            "batching-report": self._batching_report,
            "batching-lists": self._batching_lists,
            "batching-steps": self._batching_steps,
            **Tracing(fleet).handlers,
        }

    async def answer(self, verb: str, args: dict[str, Any], who: str) -> Any:
        """The result of a verb.

        Raises:
            Refused: not possible as asked; nothing was changed.
            CallError: unknown verb, or a child that was needed failed.
        """
        handler = self._handlers.get(verb)
        if handler is None:
            raise CallError(f"unknown verb '{verb}'; known: {', '.join(self._handlers)}")
        return await handler(args, who)

    async def set_key(self, name: str, value: Any, who: str) -> dict[str, Any]:
        """Change one live key in every process, or in none.

        Raises:
            Refused: not live, wrong type, out of range, or a child refused; the old value stays everywhere.
        """
        async with self._setting:
            fleet = self._fleet
            before = fleet.config
            try:
                config, old, new = set_value(before, name, value)
            except ConfigError as error:
                raise Refused(str(error)) from error
            if problems := live_problems(config):
                raise Refused("; ".join(problems))
            args = {"key": name, "value": new, "config": msgspec.to_builtins(config)}
            # Workers first: they know the ranges of an algorithm's parameters, the api takes what they took.
            order = [*fleet.workers.values(), fleet.children[API]]
            self._require_checker(name, order)
            # Before anybody is asked: a child that is started meanwhile begins with it.
            fleet.config = config
            try:
                pending = await self._apply(order, args)
            except Refused:
                fleet.config = before
                await self._undo(order, args | {"value": old, "config": msgspec.to_builtins(before)})
                raise
            if name == "server.log_level":
                logs.set_level(config.server.log_level)
            audit.info("set %s: %r -> %r by %s", name, old, new, who)
            return {"key": name, "old": old, "new": new, "pending": pending}

    async def _apply(self, order: list[Child], args: dict[str, Any]) -> list[str]:
        """Send a change to every child; returns the names of those that will apply it later, when they get to it.

        Raises:
            Refused: by one of them.
        """
        pending = []
        for child in _running(order):
            try:
                await _give(child, args)
            except Refused as error:
                raise Refused(f"{args['key']}: {error}") from error
            except CallError as error:
                why = error if child.ready_at else f"{child.name} is starting, and applies it when it gets to it"
                log.warning("set %s: %s", args["key"], why)
                pending.append(child.name)
        return pending

    async def _undo(self, order: list[Child], args: dict[str, Any]) -> None:
        """Give every child the old value: the one that refused has it, others may have been started with the new one."""
        for child in _running(order):
            try:
                await _give(child, args)
            except (CallError, Refused) as error:
                log.warning("set %s back: %s", args["key"], error)

    def _require_checker(self, name: str, children: Iterable[Child]) -> None:
        """An algorithm's parameter is not taken on trust: some worker must be there to check it."""
        if name.startswith("routes.") and not any(child.state == "up" and child.name != API for child in children):
            raise Refused(f"{name}: no worker is up to check the value; try again when one is")

    async def _set(self, args: dict[str, Any], who: str) -> dict[str, Any]:
        if not {"key", "value"} <= args.keys():
            raise CallError("set needs key and value")
        return await self.set_key(str(args["key"]), args["value"], who)

    async def _begin_drain(self, args: dict[str, Any], who: str) -> dict[str, Any]:
        del args
        self._drain(f"trouterctl ({who})")
        return {"state": "draining", "drain_timeout": self._fleet.config.server.drain_timeout}

    async def _abort(self, args: dict[str, Any], who: str) -> Any:
        if "id" not in args:
            raise CallError("abort needs id")
        result = await self._fleet.children[API].call("abort", args)
        audit.info("abort %s by %s", args["id"], who)
        return result

    async def _flush_cache(self, args: dict[str, Any], who: str) -> dict[str, Any]:
        del args
        audit.info("flush-cache by %s", who)
        return await self._gather("flush-cache", self._fleet.workers.values())

    async def _batching(self, args: dict[str, Any], who: str) -> dict[str, Any]:
        """What every worker launches by, and what the controller in the api makes of it."""
        del args, who
        answers = await self._gather("batching", self._fleet.children.values())
        return {"controller": answers.pop(API), "models": answers}

    async def _batching_report(self, args: dict[str, Any], who: str) -> dict[str, Any]:
        """For the controller: what workers have counted."""
        del args, who
        return await self._gather("batching-report", self._fleet.workers.values())

    async def _batching_steps(self, args: dict[str, Any], who: str) -> dict[str, Any]:
        """For measurements: every worker's steps that ended after `since`, seconds of time.monotonic()."""
        del who
        since = args.get("since")
        if not isinstance(since, int | float):
            raise Refused(f"since: expected seconds of the monotonic clock, got {since!r}")
        return await self._gather("batching-steps", self._fleet.workers.values(), {"since": since})

    async def _batching_lists(self, args: dict[str, Any], who: str) -> dict[str, Any]:
        """From the controller, for every worker."""
        if who != API:
            raise Refused("batching-lists: only the controller sends them; set models.X.thresholds instead")
        return await self._gather("batching-lists", self._fleet.workers.values(), args)

    async def _requests(self, args: dict[str, Any], who: str) -> dict[str, Any]:
        del args, who
        answers = await self._gather("requests", self._fleet.children.values())
        return {"requests": answers.pop(API), "workers": answers}

    async def _metrics(self, args: dict[str, Any], who: str) -> list[dict[str, Any]]:
        """Metric families of the supervisor and all workers, in the shape of `trouterd.metrics.Family`."""
        del args, who
        families = self._own_metrics()
        for answer in (await self._gather("metrics", self._fleet.workers.values())).values():
            families += answer if isinstance(answer, list) else []
        return families

    async def _models(self, args: dict[str, Any], who: str) -> dict[str, Any]:
        del args, who
        fleet = self._fleet
        models = [
            {"name": name, "path": model.path, "device": model.device, "gpus": list(model.gpus)}
            | {"state": fleet.children[name].state}
            | fleet.children[name].detail
            for name, model in fleet.config.models.items()
        ]
        routes = [{"name": name} | msgspec.to_builtins(route) for name, route in fleet.config.routes.items()]
        return {"models": models, "routes": routes}

    async def _status(self, args: dict[str, Any], who: str) -> dict[str, Any]:
        del args, who
        fleet = self._fleet
        answers = await self._gather("status", fleet.children.values())
        return {
            "version": __version__,
            "state": self._state(),
            "uptime_seconds": round(time.monotonic() - self._started, 3),
            "addresses": self._addresses(),
            "processes": [_process_report(child) for child in fleet.children.values()],
            "rings": fleet.mesh.report(),
            "api": answers.pop(API),
            "workers": answers,
        }

    def _state(self) -> str:
        fleet = self._fleet
        if fleet.stopping:
            return "draining"
        if all(child.state == "up" for child in fleet.children.values()):
            return "ready"
        return "degraded" if all(child.ever_ready for child in fleet.children.values()) else "starting"

    async def _gather(self, verb: str, children: Iterable[Child], args: dict[str, Any] | None = None) -> dict[str, Any]:
        """Every child's answer by name; `{"error": ...}` for one that gave none."""

        async def ask(child: Child) -> Any:
            try:
                return await child.call(verb, args, SCRAPE_TIMEOUT)
            except (CallError, Refused) as error:
                return {"error": str(error)}

        asked = list(children)
        answers = await asyncio.gather(*map(ask, asked))
        return {child.name: answer for child, answer in zip(asked, answers, strict=True)}

    def _own_metrics(self) -> list[dict[str, Any]]:
        children = list(self._fleet.children.values())
        rings = [({"src": ring["from"], "dst": ring["to"]}, ring) for ring in self._fleet.mesh.report()]
        restarts = [({"process": child.name}, child.restarts) for child in children]
        up = [({"process": child.name}, int(child.state == "up")) for child in children]
        memory = [({"process": child.name}, resident_bytes(child.pid)) for child in children]
        return [
            _family("worker_restarts", "counter", "How often a process was started again.", restarts),
            _family("process_up", "gauge", "1 = the process is ready and makes progress.", up),
            _family("process_rss_bytes", "gauge", "Resident memory of the process.", memory),
            _family("ring_fill_bytes", "gauge", "Bytes that wait in a ring.", _column(rings, "fill_bytes")),
            _family("ring_depth", "gauge", "Messages that wait for a full ring.", _column(rings, "spill_records")),
            _family("ring_full", "counter", "How often a ring was found full.", _column(rings, "full_events")),
            _family("ring_rejected", "counter", "Messages that no ring took.", _column(rings, "rejected")),
        ]


def _column(rings: list[tuple[dict[str, str], dict[str, Any]]], key: str) -> list[tuple[dict[str, str], int]]:
    return [(labels, ring[key]) for labels, ring in rings]


def _family(name: str, kind: str, text: str, values: list[tuple[dict[str, str], int]]) -> dict[str, Any]:
    suffix = "_total" if kind == "counter" else ""
    samples = [{"suffix": suffix, "labels": labels, "value": value} for labels, value in values]
    return {"name": name, "help": text, "type": kind, "samples": samples}


def _process_report(child: Child) -> dict[str, Any]:
    running = child.state != "down"
    return {
        "name": child.name,
        "state": child.state,
        "pid": child.pid if running else 0,
        "epoch": child.epoch,
        "restarts": child.restarts,
        "rss_bytes": resident_bytes(child.pid) if running else 0,
        "uptime_seconds": round(time.monotonic() - child.started, 3) if running else 0.0,
        "steps": child.steps,
        "step_seconds": child.step_seconds,
    }


def _running(order: Iterable[Child]) -> Iterator[Child]:
    """Those that a change has to be sent to: the others get the whole configuration when they are started."""
    return (child for child in order if child.state != "down")


async def _give(child: Child, args: dict[str, Any]) -> None:
    """Send a change to a child; one that is starting applies it when it gets to it. Raises CallError, Refused."""
    await child.call("set", args, SCRAPE_TIMEOUT if child.ready_at else 0)
