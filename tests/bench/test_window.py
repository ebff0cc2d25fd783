"""Windows of a daemon with scripted models: clients' view, the models' own counts, and what follows from both."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import msgspec
import pytest

from bench.counters import Scrape, over_control, page, steps_over_control
from bench.daemon import Link, Served, running
from bench.endpoint import Address, Connection
from bench.ideal import ideal, ideal_of
from bench.overlap import overlaps
from bench.percentiles import Percentiles
from bench.target import ModelCounters, Target
from bench.window import Window, measure
from bench.workloads import Workload, find
from tests.bench.fake_server import FakeServer
from tests.daemon.instance import scripts
from trouterd.batching.bound import ideal as bound
from trouterd.batching.network import Network, StepTime
from trouterd.batching.report import Step
from trouterd.worker.observer import LATEST

pytestmark = pytest.mark.timeout(180)
STEP_MS = {"small": 4.0, "large": 12.0}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("w")
    chance = 'models = ["small", "large"]\nalgorithm = "bernoulli"\nparams = { p = 0.35 }'
    config = scripts(folder, delay_ms=STEP_MS["small"], large_delay_ms=STEP_MS["large"], **{"routes.chance": chance})
    with running(folder, config) as daemon:
        yield daemon


def target(served: Served, model: str, link: Link | None = None) -> Target:
    names = ["small", "large"]
    counters, steps = (over_control(link, names), steps_over_control(link, names)) if link else (None, None)
    url = f"unix:{served.socket}"
    return Target(f"trouterd {model}", url, model, 1, counters=counters, steps=steps, large="large")


@pytest.mark.parametrize("control", [False, True])
async def test_a_route(served: Served, control: bool) -> None:
    parts: list[float] = []
    with closing(Link(served)) as link:
        goal = target(served, "chance", link if control else None)
        window = await measure(goal, find("20/60"), 3, seconds=1.5, settle=0.3, progress=parts.append)
    assert parts[0] == 0
    assert parts[-1] == pytest.approx(1)
    assert parts == sorted(parts)
    assert (window.system, window.workload, window.streams) == ("trouterd chance", "20/60", 3)
    assert window.seconds >= 1.5
    if control:
        # Scripts take their time whatever runs beside them.
        for name, own in window.overlap.items():
            assert own.batch == pytest.approx(window.batch[name], rel=0.3)
            assert own.step_ms >= STEP_MS[name]
            assert 0 < own.overlap_ms <= own.step_ms
    assert bool(window.overlap) == control
    counted = window.extra["counted"]
    assert isinstance(counted, float)
    assert window.tokens_per_second == pytest.approx(counted, rel=0.35)
    assert sum(window.tokens_per_model.values()) == pytest.approx(counted)
    assert window.handoffs_per_100 is not None
    assert window.handoffs_per_100 == pytest.approx(200 * window.tokens_per_model["large"] / counted, rel=0.1)
    assert all(window.step_ms[name] >= least for name, least in STEP_MS.items())
    assert all(0.5 <= size <= 3 for size in window.batch.values())
    assert all(0 < part <= 1.1 for part in window.busy.values())
    assert window.gap_ms is not None
    assert window.gap_ms.p50 <= window.gap_ms.p95 <= window.gap_ms.p99
    assert window.requests > 0
    assert window.ttft_ms is not None
    assert window.request_ms is not None
    assert window.request_ms.mean > window.ttft_ms.mean
    assert window.gpu_seconds_per_1000 == pytest.approx(1000 / window.tokens_per_second)
    assert window.large_forwards_per_1000 is not None
    assert 0 < window.large_forwards_per_1000 < 1000
    assert window.ideal is not None
    assert window.tokens_per_second < 1.35 * window.ideal
    assert isinstance(window.extra["handoff_ms"], float)
    assert msgspec.convert(json.loads(json.dumps(asdict(window))), Window) == window


async def test_the_large_model_alone(served: Served) -> None:
    window = await measure(target(served, "large"), find("20/4000"), 2, seconds=0.6, settle=0.2)
    assert set(window.tokens_per_model) == {"large"}
    assert window.large_forwards_per_1000 == pytest.approx(500, rel=0.05)
    assert window.batch["large"] == pytest.approx(2, rel=0.05)
    assert window.handoffs_per_100 == 0
    assert window.requests == 0
    assert window.request_ms is None
    assert window.extra["ttft_of"] == "start"
    assert window.ttft_ms is not None
    assert window.ideal == pytest.approx(2000 / window.step_ms["large"], rel=0.05)


async def test_turns_meet_the_prefix_cache(served: Served) -> None:
    """The second turn's prompt holds the first one's answer as the model has written it, so that all of it is in the cache."""
    workload = Workload("turns", ((64, 32), (16, 32)), system=32)
    connection = Connection(Address.of(f"unix:{served.socket}"))
    pages = [await page(connection)]
    window = await measure(target(served, "small"), workload, 2, seconds=1.0, settle=0.2)
    pages.append(await page(connection))
    connection.close()
    assert window.requests > 4
    before, after = (Scrape.of(*found) for found in pages if found)
    fed, prompts, written = (
        after.total(name) - before.total(name)
        for name in ("worker_rows_total", "prompt_tokens_total", "generation_tokens_total")
    )
    assert fed < 0.6 * (prompts + written)


async def test_a_foreign_server_says_nothing_of_itself(tmp_path: Path) -> None:
    async with FakeServer(length=7).served(tmp_path, tcp=True) as url:
        window = await measure(Target("other", url, "fake", 4), find("5/50"), 2, seconds=0.3, settle=0.05)
    assert window.tokens_per_second > 0
    assert window.gpu_seconds_per_1000 == pytest.approx(4000 / window.tokens_per_second)
    assert (window.tokens_per_model, window.batch, window.step_ms, window.busy) == ({}, {}, {}, {})
    assert (window.ideal, window.handoffs_per_100, window.large_forwards_per_1000) == (None, None, None)
    assert window.extra["gpus"] == 4
    assert int(window.extra["short_answers"]) >= window.requests > 0


async def test_prompts_of_windows_differ(tmp_path: Path) -> None:
    server = FakeServer()
    async with server.served(tmp_path) as url:
        for _ in range(2):
            await measure(Target("other", url, "fake", 1), find("12/3"), 1, seconds=0.05, settle=0.01)
    prompts = [tuple(body["prompt"]) for body in server.bodies if body["max_tokens"] == 3]
    assert len(set(prompts)) == len(prompts)


def test_for_how_long_models_ran_side_by_side() -> None:
    steps = {
        # The window begins at 1; a prompt from 3 to 4 is no step of its own, but runs beside the other model's.
        "small": [Step(0.5, 1.0, 1), Step(1.5, 1.0, 2), Step(3.0, 1.0, 0), Step(4.5, 1.0, 4), Step(8.0, 1.0, 1)],
        "large": [Step(2.0, 3.0, 8)],
        "idle": [],
    }
    found = overlaps(steps, 1.0, 8.5)
    assert found.keys() == {"small", "large"}
    assert (found["small"].steps, found["small"].batch, found["small"].step_ms) == (2, 3.0, 1e3)
    assert found["small"].overlap_ms == pytest.approx(500)
    assert (found["large"].steps, found["large"].batch, found["large"].step_ms) == (1, 8.0, 3e3)
    assert found["large"].overlap_ms == pytest.approx(2e3)


def test_steps_that_nobody_has_kept_are_missing_of_all_models() -> None:
    small = [Step(10.0 + number, 0.5, 1) for number in range(LATEST)]
    found = overlaps({"small": small, "large": [Step(2.0, 1.0, 4), Step(11.25, 1.0, 4)]}, 1.0, 20.0)
    assert found["large"].steps == 1
    assert found["large"].overlap_ms == pytest.approx(500)


def test_percentiles() -> None:
    assert Percentiles.of([]) is None
    assert Percentiles.of([0.001, 0.003]) == Percentiles(2.0, 2.0, pytest.approx(2.9), pytest.approx(2.98))


def spent(decisions: int, share: float, step_ms: float, batch: float, tokens: int) -> ModelCounters:
    requests = round(decisions * share)
    steps = round(requests / batch)
    return ModelCounters(tokens, steps, requests, steps * step_ms / 1e3, 0)


def test_ideal_is_the_bound_of_the_published_pair() -> None:
    network = Network.pair([StepTime.affine(6.0e-3), StepTime.affine(27.9e-3)], 0.35)
    small, large = network.shares
    decisions = 135_000
    models = {
        "small": spent(decisions, small, 6.0, 1.8, round(decisions * small * 0.65)),
        "large": spent(decisions, large, 27.9, 2.4, round(decisions * large)),
    }
    assert ideal(models, 4) == pytest.approx(bound(network, 4) * network.tokens_per_step, rel=1e-3)
    assert ideal(models, 4) == pytest.approx(253.7, rel=1e-3)


@pytest.mark.parametrize(("batches", "busy"), [((3.0, 12.0), (0.9, 0.8)), ((1.2, 4.0), (0.5, 0.7)), ((1.0,), (0.99,))])
def test_share_of_the_ideal_is_the_time_in_steps(batches: tuple[float, ...], busy: tuple[float, ...]) -> None:
    """Whatever waits, and for whatever reason, is what lacks; of a model alone as of two."""
    seconds, streams, times = 100.0, 16, (2.4e-3, 15.4e-3)
    models = {}
    for name, batch, part, time in zip(("small", "large"), batches, busy, times, strict=False):
        steps = round(seconds * part / time)
        requests = round(steps * batch)
        models[name] = ModelCounters(requests, steps, requests, steps * time, 0)
    tokens = sum(own.tokens for own in models.values())
    found = ideal(models, streams)
    assert found is not None
    in_steps = sum(batch * part for batch, part in zip(batches, busy, strict=True))
    assert tokens / seconds / found == pytest.approx(in_steps / streams, rel=1e-3)
    # A file has what it takes to say so again.
    window = {
        "streams": streams,
        "seconds": seconds,
        "tokens_per_model": {name: own.tokens / seconds for name, own in models.items()},
        "batch": {name: own.step_requests / own.steps for name, own in models.items()},
        "step_ms": {name: 1e3 * own.busy_seconds / own.steps for name, own in models.items()},
        "busy": {name: own.busy_seconds / seconds for name, own in models.items()},
    }
    assert ideal_of(window) == pytest.approx(found, rel=1e-3)


def test_nothing_ideal_without_steps() -> None:
    assert ideal({}, 16) is None
    assert ideal_of({"streams": 4, "tokens_per_model": {}, "seconds": 5.0}) is None
