"""Delayed batching in the real daemon: scripted models whose steps take a given time, in processes of their own.

    python -m bench.batching --daemon [--requests 4,8,16] [--seconds 8] [--step-ms 6,28] [--repeats 3] [--patterns every-3,bursty]
        [--others 0.1] [--markdown FILE] [--plots FOLDER]

Step times are scripted, everything else is real: HTTP, rings, schedulers, hand-offs. What the daemon adds to a step (sampling,
routing, commits) is measured first and taken off the scripts' delays, so that steps last what was asked for. Throughput is what
workers committed in a window during which a fixed number of streams is under way. Ways to launch are compared in turns, several
times; a window in which other programs used the host is taken again. Predictions take step times and the time of a hand-off as the
workers measured them in that window. What the daemon cannot do, all models stepping together, is simulated with the same times.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.deployment import SCRIPT, Deployment, Fleet, ModelSpec, RouteSpec, serving
from bench.endpoint import Address, Connection
from bench.neighbours import Neighbours
from trouterd.batching.launch import clamp
from trouterd.batching.network import Network, StepTime
from trouterd.batching.policies import Synchronous
from trouterd.batching.predictor import Predictor
from trouterd.batching.search import search
from trouterd.batching.simulator import simulate
from trouterd.batching.workload import MarkovWorkload

NAMES = ("small", "large")
SHARE = 0.35
SETTLE = 1.5
"""Seconds of load before the window."""
LEARN = 30.0
"""Seconds of load that the controller gets before its windows."""
PATTERNS = ("geometric", "every 3", "bursty", "unlike requests")
CALIBRATIONS = 2
_RETAKES = 5
"""How often a window is taken again while others use the host."""
_BURSTY = Path(__file__).with_name("bursty.py")
_TOKENS = 60_000
_SYNC_STEPS = 40_000


@dataclass(frozen=True)
class Run:
    """One window."""

    requests: int
    pattern: str
    how: str
    thresholds: tuple[int, ...]
    """In force at its end."""
    measured: float
    """Tokens/s."""
    predicted: float
    """For these thresholds, by the model of geometric runs, with the step times and hand-overs of the window."""
    step_ms: tuple[float, ...]
    share: float
    """Hand-overs by steps of the small model."""
    handoff_ms: float
    """From the end of a step to a launch that waited for what it handed over."""
    others: float
    """CPUs that other programs kept busy."""
    batches: tuple[float, ...]
    """Mean requests of a step."""
    over_eager: float = 1.0
    """Measured tokens/s over those of the eager window of the same turn."""


@dataclass
class Report:
    """Everything that was measured."""

    step_ms: tuple[float, ...]
    """That steps were meant to take."""
    delays_ms: tuple[float, ...]
    """Of the scripts."""
    calibration_others: float
    """CPUs that other programs kept busy while those were found."""
    seconds: float
    runs: list[Run] = field(default_factory=list)
    synchronous: dict[int, float] = field(default_factory=dict)
    """Simulated tokens/s of models that step together, by requests."""


@dataclass(frozen=True)
class Settings:
    """What is measured, and how."""

    requests: tuple[int, ...] = (4, 8, 16)
    seconds: float = 8.0
    """Of a window."""
    step_ms: tuple[float, ...] = (6.0, 28.0)
    repeats: int = 3
    patterns: tuple[str, ...] = PATTERNS
    others: float = 0.1
    """CPUs that other programs may keep busy in a window."""


def measure(settings: Settings) -> Report:
    """Run everything."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        delays, others = settings.step_ms, 0.0
        for _ in range(CALIBRATIONS):
            with serving(deployment(delays), folder) as fleet:
                run = asyncio.run(_Bench(fleet, settings).calibration())
            found = zip(delays, settings.step_ms, run.step_ms, strict=True)
            delays, others = tuple(max(delay + wanted - taken, 0.0) for delay, wanted, taken in found), run.others
        report = Report(settings.step_ms, delays, others, settings.seconds)
        with serving(deployment(delays), folder) as fleet:
            asyncio.run(_Bench(fleet, settings).run(report))
    return report


def deployment(step_ms: Sequence[float]) -> Deployment:
    """Two scripted models, and one route per pattern."""
    return Deployment(
        models=tuple(ModelSpec(name, f"{SCRIPT}{ms}") for name, ms in zip(NAMES, step_ms, strict=True)),
        routes=(
            RouteSpec("geometric", NAMES, "bernoulli", f"p = {SHARE}"),
            RouteSpec("every-3", NAMES, "every_n", 'shape = "visit", n = 3'),
            RouteSpec("bursty", NAMES, str(_BURSTY)),
        ),
    )


class _Bench:
    """The measurements of one daemon."""

    def __init__(self, fleet: Fleet, settings: Settings) -> None:
        self._fleet, self._settings = fleet, settings
        self._neighbours = Neighbours([process["pid"] for process in fleet.served.ctl("status")["processes"]])

    @property
    def _middle(self) -> int:
        return self._settings.requests[len(self._settings.requests) // 2]

    async def calibration(self) -> Run:
        """One window of the middle number of requests that launch eagerly."""
        async with _load(self._fleet, "geometric", self._middle):
            _pin(self._fleet, (1, 1), self._middle)
            run = await self._window(self._middle, "geometric", "eager", SETTLE)
        return run

    async def run(self, report: Report) -> None:
        """Everything else."""
        for count in self._settings.requests:
            runs = await self._geometric(count)
            report.runs += runs
            times = np.median([run.step_ms for run in runs if run.how == "eager"], axis=0)
            network = Network.pair([StepTime.affine(ms / 1e3) for ms in times.tolist()], SHARE)
            outcome = simulate(network, Synchronous(), MarkovWorkload(network.routing, count, 0), _SYNC_STEPS)
            report.synchronous[count] = outcome.tokens_per_second
        for pattern in self._settings.patterns:
            report.runs += await self._pattern(pattern, self._middle)

    async def _geometric(self, count: int) -> list[Run]:
        """The best thresholds for the step times that were asked for, wrong ones, and none."""
        runs: list[Run] = []
        async with _load(self._fleet, "geometric", count):
            _pin(self._fleet, (1, 1), count)
            first = await self._window(count, "geometric", "eager", SETTLE)
            times = [StepTime.affine(ms / 1e3) for ms in self._settings.step_ms]
            network = Network.pair(times, SHARE, handoff=first.handoff_ms / 1e3)
            best = search(Predictor(network, count), count).thresholds
            tries = {
                "eager": (1, 1),
                "B* x 0.5": scaled(best, 0.5, count),
                "B*": best,
                "B* x 2": scaled(best, 2.0, count),
            }
            for _ in range(self._settings.repeats):
                turn: list[Run] = []
                for how, thresholds in tries.items():
                    _pin(self._fleet, thresholds, count)
                    turn.append(await self._window(count, "geometric", how, SETTLE))
                runs += [_over(run, turn[0]) for run in turn]
        return runs

    async def _pattern(self, pattern: str, count: int) -> list[Run]:
        """Eager, the best thresholds of geometric runs, and the controller's."""
        runs: list[Run] = []
        async with _load(self._fleet, pattern, count):
            for _ in range(self._settings.repeats):
                self._fleet.live("batching.mode", "eager")
                runs.append(await self._window(count, pattern, "eager", SETTLE))
                best = search(Predictor(nominal_of(runs[0]), count), count).thresholds
                _pin(self._fleet, best, count)
                runs.append(_over(await self._window(count, pattern, "B*", SETTLE), runs[-1]))
            self._fleet.live("batching.mode", "auto")
            for repeat in range(self._settings.repeats):
                run = await self._window(count, pattern, "controller", SETTLE if repeat else LEARN)
                runs.append(_over(run, runs[2 * repeat]))
        return runs

    async def _window(self, count: int, pattern: str, how: str, settle: float) -> Run:
        """A window; again while others use the host, and then the quietest one."""
        runs: list[Run] = []
        while not runs or (runs[-1].others > self._settings.others and len(runs) <= _RETAKES):
            await asyncio.sleep(SETTLE if runs else settle)
            runs.append(await self._look(count, pattern, how))
        return min(runs, key=lambda run: run.others)

    async def _look(self, count: int, pattern: str, how: str) -> Run:
        self._neighbours.start()
        before = (await asyncio.to_thread(self._fleet.call, "batching"))["models"]
        await asyncio.sleep(self._settings.seconds)
        after = (await asyncio.to_thread(self._fleet.call, "batching"))["models"]
        others = self._neighbours.busy()

        def grown(name: str, key: str) -> float:
            return float(after[name][key] - before[name][key])

        def mean(key: str) -> float:
            """Of what both models counted."""
            number = sum(grown(name, key) for name in NAMES)
            return sum(grown(name, f"{key}_seconds") for name in NAMES) / number if number else 0.0

        run = Run(
            requests=count,
            pattern=pattern,
            how=how,
            thresholds=tuple(after[name]["threshold"] for name in NAMES),
            measured=sum(grown(name, "tokens") for name in NAMES) / grown(NAMES[0], "now"),
            predicted=0.0,
            step_ms=tuple(1e3 * grown(name, "busy_seconds") / grown(name, "steps") for name in NAMES),
            share=grown("small", "handoffs") / grown("small", "step_requests"),
            batches=tuple(grown(name, "step_requests") / grown(name, "steps") for name in NAMES),
            handoff_ms=1e3 * max(mean("waited") - mean("handed"), 0.0),
            others=others,
        )
        network = nominal_of(run)
        predicted = Predictor(network, count).steps_per_second(count, clamp(run.thresholds, count))
        return replace(run, predicted=predicted * network.tokens_per_step)


def _over(run: Run, eager: Run) -> Run:
    return replace(run, over_eager=run.measured / eager.measured)


def scaled(thresholds: Sequence[int], factor: float, count: int) -> tuple[int, ...]:
    """Thresholds of a wrong choice, made feasible."""
    return clamp([round(threshold * factor) if threshold > 1 else 1 for threshold in thresholds], count)


def nominal_of(run: Run) -> Network:
    """The throughput model's view of a window."""
    times = [StepTime.affine(ms / 1e3) for ms in run.step_ms]
    return Network.pair(times, min(run.share, 1.0), handoff=run.handoff_ms / 1e3)


def _pin(fleet: Fleet, thresholds: Sequence[int], count: int) -> None:
    fleet.pin(dict(zip(NAMES, thresholds, strict=True)), count)


@asynccontextmanager
async def _load(fleet: Fleet, pattern: str, count: int) -> AsyncIterator[None]:
    """Streams that are under way inside the block."""
    connections = [Connection(Address.of(f"unix:{fleet.served.socket}")) for _ in range(count)]
    asks = [
        asyncio.ensure_future(connection.ask("POST", "/v1/completions", _body(pattern, number), lambda *_: None))
        for number, connection in enumerate(connections)
    ]
    try:
        yield
        if any(ask.done() for ask in asks):
            raise RuntimeError("a stream ended inside a measurement: give it more tokens")
    finally:
        for ask in asks:
            ask.cancel()
        await asyncio.gather(*asks, return_exceptions=True)


def _public(pattern: str) -> str:
    return "geometric" if pattern == "unlike requests" else pattern.replace(" ", "-")


def _body(pattern: str, number: int) -> dict[str, Any]:
    # Half of the unlike requests hand over rarely, half often; the mean is that of the others.
    unlike = {"route": {"params": {"p": 0.05 if number % 2 else 0.65}}} if pattern == "unlike requests" else {}
    return {
        "model": _public(pattern),
        "prompt": [1 + number],
        "max_tokens": _TOKENS,
        "ignore_eos": True,
        "temperature": 0,
        "seed": number,
        "stream": True,
    } | unlike
