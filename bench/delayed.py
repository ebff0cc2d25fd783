"""Delayed batching in the real daemon: scripted models whose steps take a given time, in processes of their own.

    python -m bench.batching --daemon [--requests 4,8,16] [--seconds 8] [--step-ms 6,28] [--markdown FILE] [--plots FOLDER]

Step times are scripted, everything else is real: HTTP, rings, schedulers, hand-offs. Throughput is what workers committed in a
window during which a fixed number of streams is under way. Predictions take step times as measured in that window, from launch
to results in the decode loop, so that they say how good the model is and not how precisely a process sleeps. What the daemon
cannot do, all models stepping together, is simulated with the same times.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.deployment import SCRIPT, Deployment, Fleet, ModelSpec, RouteSpec, serving
from bench.load import Stream
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
"""Seconds of load that the controller gets before its window."""
PATTERNS = ("geometric", "every 3", "bursty", "unlike requests")
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
    batches: tuple[float, ...]
    """Mean requests of a step."""


@dataclass
class Report:
    """Everything that was measured."""

    step_ms: tuple[float, ...]
    seconds: float
    runs: list[Run] = field(default_factory=list)
    synchronous: dict[int, float] = field(default_factory=dict)
    """Simulated tokens/s of models that step together, by requests."""


def measure(requests: Sequence[int], seconds: float, step_ms: Sequence[float]) -> Report:
    """Run everything."""
    report = Report(tuple(step_ms), seconds)
    with tempfile.TemporaryDirectory(prefix="bench-") as name, serving(deployment(step_ms), Path(name)) as fleet:
        asyncio.run(_measure(fleet, report, requests))
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


async def _measure(fleet: Fleet, report: Report, requests: Sequence[int]) -> None:
    for count in requests:
        nominal = Network.pair([StepTime.affine(ms / 1e3) for ms in report.step_ms], SHARE)
        best = search(Predictor(nominal, count), count).thresholds
        tries = {
            "eager": (1, 1),
            "B* x 0.5": scaled(best, 0.5, count),
            "B*": best,
            "B* x 2": scaled(best, 2.0, count),
        }
        async with _load(fleet, "geometric", count):
            for how, thresholds in tries.items():
                fleet.pin(dict(zip(NAMES, thresholds, strict=True)), count)
                report.runs.append(await _window(fleet, report.seconds, count, "geometric", how, SETTLE))
        eager = nominal_of(next(run for run in report.runs if run.requests == count))
        outcome = simulate(eager, Synchronous(), MarkovWorkload(eager.routing, count, 0), _SYNC_STEPS)
        report.synchronous[count] = outcome.tokens_per_second
    middle = requests[len(requests) // 2]
    for pattern in PATTERNS:
        async with _load(fleet, pattern, middle):
            fleet.live("batching.mode", "eager")
            report.runs.append(await _window(fleet, report.seconds, middle, pattern, "eager", SETTLE))
            best = search(Predictor(nominal_of(report.runs[-1]), middle), middle).thresholds
            fleet.pin(dict(zip(NAMES, best, strict=True)), middle)
            report.runs.append(await _window(fleet, report.seconds, middle, pattern, "B*", SETTLE))
            fleet.live("batching.mode", "auto")
            report.runs.append(await _window(fleet, report.seconds, middle, pattern, "controller", LEARN))


def scaled(thresholds: Sequence[int], factor: float, count: int) -> tuple[int, ...]:
    """Thresholds of a wrong choice, made feasible."""
    return clamp([round(threshold * factor) if threshold > 1 else 1 for threshold in thresholds], count)


def nominal_of(run: Run) -> Network:
    """The throughput model's view of a window."""
    return Network.pair([StepTime.affine(ms / 1e3) for ms in run.step_ms], min(run.share, 1.0))


async def _window(fleet: Fleet, seconds: float, count: int, pattern: str, how: str, settle: float) -> Run:
    await asyncio.sleep(settle)
    before = (await asyncio.to_thread(fleet.call, "batching"))["models"]
    await asyncio.sleep(seconds)
    after = (await asyncio.to_thread(fleet.call, "batching"))["models"]

    def grown(name: str, key: str) -> float:
        return float(after[name][key] - before[name][key])

    span = grown(NAMES[0], "now")
    step_ms = tuple(1e3 * grown(name, "busy_seconds") / grown(name, "steps") for name in NAMES)
    run = Run(
        requests=count,
        pattern=pattern,
        how=how,
        thresholds=tuple(after[name]["threshold"] for name in NAMES),
        measured=sum(grown(name, "tokens") for name in NAMES) / span,
        predicted=0.0,
        step_ms=step_ms,
        share=grown("small", "handoffs") / grown("small", "step_requests"),
        batches=tuple(grown(name, "step_requests") / grown(name, "steps") for name in NAMES),
    )
    network = nominal_of(run)
    predicted = Predictor(network, count).steps_per_second(count, clamp(run.thresholds, count))
    return Run(**(asdict(run) | {"predicted": predicted * network.tokens_per_step}))


@asynccontextmanager
async def _load(fleet: Fleet, pattern: str, count: int) -> AsyncIterator[None]:
    """Streams that are under way inside the block."""
    loop = asyncio.get_running_loop()
    ends = [await loop.create_unix_connection(Stream, str(fleet.served.socket)) for _ in range(count)]
    asks = [
        asyncio.ensure_future(protocol.ask(transport, _body(pattern, number)))
        for number, (transport, protocol) in enumerate(ends)
    ]
    try:
        yield
        if any(ask.done() for ask in asks):
            raise RuntimeError("a stream ended inside a measurement: give it more tokens")
    finally:
        for ask in asks:
            ask.cancel()
        for transport, _ in ends:
            transport.abort()
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


# The report


def markdown(report: Report) -> Iterable[str]:
    """As text, by lines."""
    yield f"Scripted steps of {' and '.join(f'{ms:g}' for ms in report.step_ms)} ms; windows of {report.seconds:g} s."
    yield ""
    counts = ("token/s", "predicted", "error", "x eager", "mean batches", "steps, ms", "hand-overs")
    head = ("pattern", "requests", "how", "B", *counts)
    yield f"| {' | '.join(head)} |"
    yield "|---|---:|---|" + "---:|" * (len(head) - 3)
    eager = 0.0
    for run in report.runs:
        eager = run.measured if run.how == "eager" else eager  # each series begins with it
        cells = (
            run.pattern,
            run.requests,
            run.how,
            ", ".join(map(str, run.thresholds)),
            f"{run.measured:.1f}",
            f"{run.predicted:.1f}",
            f"{run.predicted / run.measured - 1:+.1%}",
            f"{run.measured / eager:.2f}",
            ", ".join(f"{batch:.1f}" for batch in run.batches),
            ", ".join(f"{ms:.2f}" for ms in run.step_ms),
            f"{run.share:.3f}",
        )
        yield f"| {' | '.join(map(str, cells))} |"
    yield ""
    for count, rate in report.synchronous.items():
        yield f"Models that step together, {count} requests: {rate:.1f} token/s, simulated with the step times of the eager run."


def plots(report: Report, folder: Path) -> list[Path]:
    """Loss curve and patterns as PNG files. Needs matplotlib: the extra `bench`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for name, title, rows in (
        ("thresholds", "geometric runs", _curves(report)),
        ("patterns", "other runs", _patterns(report)),
    ):
        figure, axes = pyplot.subplots(figsize=(7, 4.5))
        for label, points in rows.items():
            axes.plot(list(points), list(points.values()), marker="o", label=label)
        axes.set_ylabel("token/s over eager")
        axes.set_title(title)
        axes.grid(visible=True, alpha=0.3)
        axes.legend()
        path = folder / f"delayed-{name}.png"
        figure.savefig(path, dpi=150, bbox_inches="tight")
        pyplot.close(figure)
        found.append(path)
    return found


def _curves(report: Report) -> Mapping[str, Mapping[str, float]]:
    tries = [run for run in report.runs if run.pattern == "geometric"]
    return {
        f"{count} requests": _over_eager([run for run in tries if run.requests == count and run.how != "controller"])
        for count in report.synchronous
    }


def _patterns(report: Report) -> Mapping[str, Mapping[str, float]]:
    last = {(run.pattern, run.how): run for run in report.runs if run.how in ("eager", "B*", "controller")}
    return {pattern: _over_eager([run for (p, _), run in last.items() if p == pattern]) for pattern in PATTERNS}


def _over_eager(runs: Sequence[Run]) -> dict[str, float]:
    base = next((run.measured for run in runs if run.how == "eager"), 0.0)
    return {run.how: run.measured / base for run in runs if base}
