"""One measured window: a fixed number of requests is under way from before its beginning until after its end."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from bench.clients import Clients, Seen
from bench.counters import Scrape, page
from bench.dialect import learn, warm
from bench.endpoint import SILENCE, Address, Connection, EndpointError
from bench.ideal import ideal
from bench.kv_pools import cached, check_room
from bench.overlap import Overlap, overlaps
from bench.percentiles import Percentiles
from bench.target import Counters, ModelCounters, Target
from bench.waits import admission, waits
from bench.workloads import Workload
from trouterd.batching.report import Step

_CALM = 0.2
"""Seconds between a look at a target and the window: what it could not send while it looked must not come in the window."""
NONCE = secrets.randbits(32)
"""Of this process: a server that has seen the windows of another one has not seen the prompts of these."""
_LAST_STEP = 0.1
"""Seconds until the last steps of a window have ended, too: what ran beside another one is known then."""
_number = itertools.count(1)
"""Of windows: each has prompts of its own, which no prefix cache has seen."""


@dataclass(frozen=True, slots=True)
class Window:
    """What was measured, or follows from it."""

    system: str
    workload: str
    streams: int
    """Requests under way."""
    seconds: float
    tokens_per_second: float
    """Output tokens of all streams, as clients got them."""
    ttft_ms: Percentiles | None
    """From a request to its first token; of the first tokens in the window (see `extra`)."""
    gap_ms: Percentiles | None
    """From one arrival of tokens to the next one of the same answer, however many tokens came."""
    request_ms: Percentiles | None
    """From a request to the end of its answer; of whole answers (`bench.workloads.Turn`) that ended in the window."""
    requests: int
    """Whole answers that ended in the window."""
    tokens_per_model: dict[str, float]
    """Per second; empty where the server does not say who wrote what."""
    handoffs_per_100: float | None
    """Tokens; both directions."""
    batch: dict[str, float]
    """Mean requests of a step, by model, as are the next two. Empty where the server says nothing of itself."""
    step_ms: dict[str, float]
    """Mean of a step, from launch to results."""
    busy: dict[str, float]
    """Part of the window that steps took."""
    gpu_seconds_per_1000: float
    """Tokens; idle time included."""
    large_forwards_per_1000: float | None
    """Steps of the large model per 1,000 tokens; None where there is none."""
    ideal: float | None
    """Tokens/s of requests that never wait, in steps and with moves like those of this window (`bench.ideal`)."""
    overlap: dict[str, Overlap]
    """By model, where the target tells its steps: what they were like, and for how long others ran meanwhile."""
    extra: dict[str, float | str]
    """`gpus`, `large` (name of that model) and, as far as known: `ttft_of` = `start` where no request began in the window, and the
    times to the first token are those of all streams beginning at once; `held_ms`, for which a launch was held back in the mean;
    `handoff_ms`, mean from sending a hand-off to its first step; `request_estimate_ms`, what `request_ms` would be in the mean (see
    `estimate`), since a window may be too short for answers that end in it; `counted`, tokens/s by the models' own count;
    `short_answers`, how many answers were shorter than asked for although they were to ignore their end."""
    handed: dict[str, float] = field(default_factory=dict)
    """Part of a model's decisions that sent their request to another one: the rates of the routing as they came out."""
    seed: int = 0
    """Of what requests drew; of the first of several windows."""
    repeats: list[Repeat] = field(default_factory=list)
    """Where it is the mean of several windows."""
    wait_ms: dict[str, Percentiles] = field(default_factory=dict)
    """By model: from when a request could take a row there (it came, was handed over, or a step left it) to the launch of it."""
    admission_ms: Percentiles | None = None
    """The same for requests that were new."""
    cached: dict[str, float] = field(default_factory=dict)
    """By model: part of the tokens of requests that came in the window which its prefix cache had."""


@dataclass(frozen=True, slots=True)
class Repeat:
    """One of the windows of which another one is the mean."""

    seed: int
    tokens_per_second: float
    handed: dict[str, float]
    """As in `Window`."""


async def measure(
    target: Target,
    workload: Workload,
    streams: int,
    *,
    seconds: float,
    settle: float,
    seed: int = 0,
    progress: Callable[[float], None] = lambda _: None,
    silence: float = SILENCE,
) -> Window:
    """Start `streams` clients, let them settle, and watch them for `seconds`.

    Args:
        target: the system.
        workload: what clients ask; made-up prompts are new ones in every window.
        streams: how many clients there are.
        seconds: of the window.
        settle: seconds from every stream's first token to the window.
        seed: of what requests draw, the same for the same one.
        progress: told now and then which part of it is done, 0 to 1.
        silence: seconds without a byte after which a request is given up.

    Raises:
        EndpointError: the target cannot be reached, refuses a request or fails; the message names it.
        RoomError: the target's KV pools have no room for so many streams.
    """
    workload = workload.seeded(f"{NONCE} {seed} {next(_number)}")
    progress(0.0)
    dialect = await learn(target, workload, silence)
    whole = settle + seconds
    metrics = Connection(Address.of(target.url), silence)
    try:
        if found := await page(metrics):
            check_room(target.url, workload, streams, Scrape.of(*found))
        await warm(metrics, dialect, workload)
        async with Clients(dialect, workload, streams, seed=seed, silence=silence) as clients:
            clients.log.open = True
            await clients.begun()
            started = Percentiles.of(clients.log.first)
            await clients.during(max(settle - _CALM, 0), lambda passed: progress(passed / whole))
            before = await _Look.at(target, metrics)
            await clients.during(_CALM, lambda _: None)
            begin = clients.begin()
            await clients.during(seconds, lambda passed: progress((settle + passed) / whole))
            seen = clients.end(begin)
            after = await _Look.at(target, metrics)
    finally:
        metrics.close()
    spent = _Spent.between(before, after, await _steps(target, before))
    return _window(target, workload, streams, seed, seen, spent, started)


async def _steps(target: Target, before: _Look) -> Mapping[str, Sequence[Step]]:
    """The window's steps, and some before and after it; a long one has lost its first ones."""
    if target.steps is None or before.counted is None:
        return {}
    await asyncio.sleep(_LAST_STEP)
    return await asyncio.to_thread(target.steps, before.counted.now)


@dataclass(frozen=True, slots=True)
class _Look:
    """What a target says of itself at one moment."""

    counted: Counters | None
    page: tuple[float, str] | None
    """Of metrics."""

    @classmethod
    async def at(cls, target: Target, metrics: Connection) -> Self:
        """Ask it now."""
        counted = await asyncio.to_thread(target.counters) if target.counters is not None else None
        return cls(counted, await page(metrics))


@dataclass(frozen=True, slots=True)
class _Spent:
    """What has happened between two looks."""

    seconds: float
    models: Mapping[str, ModelCounters]
    """Of those that took steps; empty where the target says nothing of itself."""
    pages: Sequence[Scrape]
    """Metrics at both ends, if it has any."""
    overlap: Mapping[str, Overlap]

    @classmethod
    def between(cls, before: _Look, after: _Look, steps: Mapping[str, Sequence[Step]]) -> Self:
        """The second minus the first, and what the steps between them were like."""
        pages = [Scrape.of(*look.page) for look in (before, after) if look.page is not None]
        counted = [look.counted for look in (before, after) if look.counted is not None]
        counted = counted or [page.counters() for page in pages]
        if len(counted) < 2:
            return cls(0.0, {}, (), {})
        old, new = counted
        models = {name: _minus(own, old.models[name]) for name, own in new.models.items() if name in old.models}
        models = {name: own for name, own in models.items() if own.steps > 0}
        ends = pages if len(pages) == 2 else ()
        return cls(new.now - old.now, models, ends, overlaps(steps, old.now, new.now))


def _delays(pages: Sequence[Scrape]) -> dict[str, float]:
    """Means between two pages of metrics."""
    if not pages:
        return {}
    metrics = {"held_ms": "batching_hold_seconds", "handoff_ms": "handoff_seconds"}
    means = {name: _mean_ms(metric, *pages) for name, metric in metrics.items()}
    return {name: mean for name, mean in means.items() if mean is not None}


def _minus(new: ModelCounters, old: ModelCounters) -> ModelCounters:
    return ModelCounters(
        tokens=new.tokens - old.tokens,
        steps=new.steps - old.steps,
        step_requests=new.step_requests - old.step_requests,
        busy_seconds=new.busy_seconds - old.busy_seconds,
        handoffs=new.handoffs - old.handoffs,
    )


def _mean_ms(metric: str, before: Scrape, after: Scrape) -> float | None:
    """Of what a histogram has seen between two pages."""
    count = after.total(f"{metric}_count") - before.total(f"{metric}_count")
    return 1e3 * (after.total(f"{metric}_sum") - before.total(f"{metric}_sum")) / count if count > 0 else None


def _window(
    target: Target,
    workload: Workload,
    streams: int,
    seed: int,
    seen: Seen,
    spent: _Spent,
    started: Percentiles | None,
) -> Window:
    rate = seen.tokens / seen.seconds
    if rate <= 0:
        raise EndpointError(target.url, f"not a single token in {seen.seconds:g} s; give it a longer window")
    models, counted = spent.models, sum(own.tokens for own in spent.models.values())
    written = {name: own.tokens / spent.seconds for name, own in models.items() if own.tokens}
    handoffs = sum(own.handoffs for own in models.values()) if counted else seen.handoffs
    large = models.get(target.large)
    extra: dict[str, float | str] = {"gpus": target.gpus, **_delays(spent.pages)}
    extra |= {"large": target.large} if target.large else {}
    extra |= {"counted": counted / spent.seconds} if counted else {}
    extra |= {"short_answers": seen.short} if seen.short else {}
    first = Percentiles.of(seen.first)
    extra |= {} if first else {"ttft_of": "start"}
    if (ttft := first or started) and workload.ignore_eos and not seen.short:
        extra["request_estimate_ms"] = estimate(seen, streams, workload.answer, ttft.mean)
    return Window(
        system=target.name,
        workload=workload.label,
        streams=streams,
        seconds=seen.seconds,
        tokens_per_second=rate,
        ttft_ms=ttft,
        gap_ms=Percentiles.of(seen.gaps),
        request_ms=Percentiles.of(seen.whole),
        requests=len(seen.whole),
        tokens_per_model=written or {name: count / seen.seconds for name, count in seen.models.items() if count > 0},
        handoffs_per_100=100 * handoffs / (counted or seen.tokens) if handoffs is not None and seen.tokens else None,
        batch={name: own.step_requests / own.steps for name, own in models.items()},
        step_ms={name: 1e3 * own.busy_seconds / own.steps for name, own in models.items()},
        busy={name: own.busy_seconds / spent.seconds for name, own in models.items()},
        gpu_seconds_per_1000=1e3 * target.gpus / rate,
        large_forwards_per_1000=1e3 * large.steps / counted if large and counted else None,
        ideal=ideal(models, streams),
        overlap=dict(spent.overlap),
        extra=extra,
        handed={name: own.handoffs / own.step_requests for name, own in models.items() if own.step_requests},
        seed=seed,
        wait_ms=waits(*spent.pages) if spent.pages else {},
        admission_ms=admission(*spent.pages) if spent.pages else None,
        cached=cached(*spent.pages) if spent.pages else {},
    )


def estimate(seen: Seen, streams: int, tokens: float, ttft_ms: float) -> float:
    """Milliseconds from a request to the end of its answer, in the mean: the time to the first token, and for each further one
    what a stream takes for it, when it does not wait for a first one.

    Args:
        seen: in a window.
        streams: how many there were.
        tokens: of an answer, in the mean.
        ttft_ms: mean time to the first token.
    """
    writing = streams * seen.seconds - sum(seen.first)
    return ttft_ms + (tokens - 1) * 1e3 * writing / seen.tokens
