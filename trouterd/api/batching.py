"""The controller's place: it asks the workers for counts, has them looked at in a thread, and sends lists.

It lives in the api because that process knows all routes, outlives every worker and computes no tokens; what workers count comes
over the control links. While it computes, threads change places often, so that the event loop never waits long.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from trouterd.batching import state
from trouterd.batching.controller import Controller
from trouterd.batching.groups import fingerprint, groups_of
from trouterd.batching.network import Network
from trouterd.batching.report import Lists, Report
from trouterd.child import CallError, Control, Refused
from trouterd.metrics import Family, gauge

log = logging.getLogger(__name__)

REPORTS = 1.0
"""Seconds between two reports of workers."""
RECOMPUTE = 5.0
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Batches that metrics give step times of."""
SAVE = 60.0
SWITCH = 2e-4
"""Seconds after which the thread that computes lets the event loop go on."""


class Batching:
    """All groups' controllers and the task that feeds them."""

    def __init__(self, control: Control) -> None:
        config = control.config
        self._control = control
        self._path = state.path_of(config, os.environ)
        self._fingerprint = fingerprint(config)
        groups = groups_of(config)
        kept = state.load(self._path, self._fingerprint) if groups else {}
        now = time.monotonic()
        self.controllers = [Controller(group, kept.get(group.models[0]), now) for group in groups]
        self._version = time.time_ns()  # above every predecessor's
        self._changed = any(controller.lists for controller in self.controllers)
        self._settled = [controller.settled for controller in self.controllers]
        """As written, or about to be."""
        self._recomputed = self._saved = now
        self._decisions: dict[str, int] = {}

    def register(self) -> None:
        """Answer the supervisor's verb."""
        self._control.handlers["batching"] = self._show

    async def run(self) -> None:
        """Until cancelled; returns at once where no route has several models."""
        if not self.controllers:
            return
        while True:
            try:
                await self._turn()
            except (CallError, Refused) as error:
                log.debug("reports of the workers are missing: %s", error)
            except Exception:  # a boundary: without its controller the daemon serves on, by the lists in force
                log.exception("the controller of delayed batching failed; it goes on with the next reports")
            await asyncio.sleep(REPORTS)

    def families(self) -> list[Family]:
        """Metrics, by each group's first model."""
        now = time.monotonic()
        rows = [({"group": c.group.models[0]}, c) for c in self.controllers]
        return [
            gauge("batching_predicted_tokens_per_second", "By the throughput model, for the lists in force; 0: unknown.",
                  [(labels, c.predicted) for labels, c in rows]),
            gauge("batching_measured_tokens_per_second", "Over the last seconds.",
                  [(labels, c.measured(now).rate) for labels, c in rows]),
            gauge("batching_ideal_tokens_per_second", "That no thresholds exceed; 0: unknown.",
                  [(labels, c.ideal) for labels, c in rows]),
            *_learned([c.network for c in self.controllers if c.network]),
        ]  # fmt: skip

    async def _turn(self) -> None:
        reports = await self._reports()
        for controller in self.controllers:
            controller.observe(reports)
        now = time.monotonic()
        moved = {name: report.decisions for name, report in reports.items()}
        if now - self._recomputed >= RECOMPUTE and moved != self._decisions:
            self._recomputed, self._decisions = now, moved
            self._changed |= await asyncio.to_thread(self._recompute)
            settled = [controller.settled for controller in self.controllers]
            if settled != self._settled:
                self._settled, self._saved = settled, min(self._saved, now - SAVE)
        if self._changed or any(report.version != self._version for report in reports.values()):
            await self._send()
        if now - self._saved >= SAVE and any(controller.network for controller in self.controllers):
            self._saved = now
            groups = {controller.group.models[0]: controller.keep(now) for controller in self.controllers}
            await asyncio.to_thread(state.save, self._path, self._fingerprint, groups)

    async def _reports(self) -> dict[str, Report]:
        answers = await self._control.call("batching-report")
        return {name: msgspec.convert(answer, Report) for name, answer in answers.items() if "error" not in answer}

    def _recompute(self) -> bool:
        batching = self._control.config.batching
        obeyed = batching.mode == "auto"
        for controller in self.controllers:
            controller.turns = not batching.overlap
        with _yielding():
            changed = [controller.recompute(time.monotonic(), obeyed=obeyed) for controller in self.controllers]
        return any(changed)

    async def _send(self) -> None:
        if self._changed:
            self._version += 1
            self._changed = False
        lists = Lists(
            version=self._version,
            thresholds={name: values for c in self.controllers for name, values in c.lists.items()},
            lingers={name: value for c in self.controllers for name, value in c.lingers.items()},
        )
        await self._control.call("batching-lists", msgspec.to_builtins(lists))

    async def _show(self, args: dict[str, Any]) -> dict[str, Any]:
        """What the controllers think."""
        del args
        now = time.monotonic()
        return {
            "mode": self._control.config.batching.mode,
            "state_file": str(self._path or ""),
            "groups": [_facts(controller, now) for controller in self.controllers],
        }


def _learned(networks: Iterable[Network]) -> list[Family]:
    """Metrics of what the throughput model goes by."""
    models = [facts for n in networks for facts in zip(n.names, n.step_times, n.contention, strict=True)]
    times = [({"model": name, "batch": str(size)}, steps.of(size)) for name, steps, _ in models for size in SIZES]
    contention = [({"model": name}, factor) for name, _, factor in models]
    return [
        gauge("batching_step_seconds", "A step by its batch, while no other model runs on the GPU; learned.", times),
        gauge("batching_contention", "By how much another running model prolongs a step; learned.", contention),
    ]


def _facts(controller: Controller, now: float) -> dict[str, Any]:
    load = controller.measured(now)
    network = controller.network
    return {
        "models": list(controller.group.models),
        "state": controller.state,
        "active": load.active,
        "measured": load.rate,
        "predicted": controller.predicted,
        "ideal": controller.ideal,
        "routing": dict(zip(network.names, network.routing, strict=True)) if network else {},
        "step_ms": {name: time.of(1) * 1e3 for name, time in zip(network.names, network.step_times, strict=True)}
        if network
        else {},
        "handoff_ms": network.handoff * 1e3 if network else 0.0,
        "trust": controller.trust,
        "contention": dict(zip(network.names, network.contention, strict=True)) if network else {},
    }


@contextlib.contextmanager
def _yielding() -> Iterator[None]:
    usual = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH)
    try:
        yield
    finally:
        sys.setswitchinterval(usual)
