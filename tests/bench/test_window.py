"""Windows of a daemon with scripted models: clients' view, the models' own counts, and what follows from both."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path

import msgspec
import pytest

from bench import window as window_module
from bench.clients import Seen
from bench.counters import Scrape, over_control, page, steps_over_control
from bench.daemon import Link, Served, running
from bench.endpoint import Address, Connection
from bench.ideal import ideal, ideal_of
from bench.kv_pools import RoomError, cached, check_room
from bench.overlap import overlaps
from bench.percentiles import Percentiles
from bench.target import Counters, ModelCounters, Target
from bench.waits import admission, waits
from bench.window import Window, estimate, measure
from bench.workloads import Workload, find
from tests.bench.fake_server import FakeServer
from tests.daemon.instance import scripts
from trouterd.batching.bound import ideal as bound
from trouterd.batching.network import Network, StepTime
from trouterd.batching.report import Step
from trouterd.metrics import merge
from trouterd.worker.observer import LATEST
from trouterd.worker.stats import Stats

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


def most_per_second(window: Window) -> float:
    """Tokens of a window of the route, were no request ever to wait: each token takes a step of the small model, and of the large
    one if that writes it, and steps of scripts take no less than they are to."""
    share = window.tokens_per_model["large"] / sum(window.tokens_per_model.values())
    return window.streams * 1e3 / (STEP_MS["small"] + share * STEP_MS["large"])


@pytest.mark.parametrize("control", [False, True])
async def test_a_route(served: Served, control: bool) -> None:
    parts: list[float] = []
    looks: list[Counters] = []
    with closing(Link(served)) as link:
        goal = target(served, "chance", link if control else None)
        if counters := goal.counters:

            def looked() -> Counters:
                looks.append(counters())
                return looks[-1]

            goal = replace(goal, counters=looked)
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
    assert window.tokens_per_second < 1.1 * most_per_second(window)
    if control:
        # The window lies between two looks: what clients got in it, the models wrote between these, and not much more.
        before, after = looks
        written = sum(after.models[name].tokens - own.tokens for name, own in before.models.items())
        outside = 1.1 * most_per_second(window) * (after.now - before.now - window.seconds)
        late = 0.1 * most_per_second(window)  # a client that gets no core does not see at once what has come
        assert written - outside - late < window.tokens_per_second * window.seconds < written + 6
    assert sum(window.tokens_per_model.values()) == pytest.approx(counted)
    assert window.handoffs_per_100 is not None
    assert window.handoffs_per_100 == pytest.approx(200 * window.tokens_per_model["large"] / counted, rel=0.1)
    assert all(window.step_ms[name] >= least for name, least in STEP_MS.items())
    # Whoever is with the large model leaves it after one token.
    assert window.handed["large"] == pytest.approx(1, abs=0.1)
    assert 0.15 < window.handed["small"] < 0.6
    assert all(0.5 <= size <= 3 for size in window.batch.values())
    assert all(0 < part <= 1.1 for part in window.busy.values())
    assert window.gap_ms is not None
    assert window.gap_ms.count >= 100
    assert window.gap_ms.p95 is not None
    assert window.gap_ms.p99 is not None
    assert window.gap_ms.p50 <= window.gap_ms.p95 <= window.gap_ms.p99
    assert window.requests > 0
    assert window.ttft_ms is not None
    assert window.request_ms is not None
    assert window.request_ms.mean > window.ttft_ms.mean
    assert window.gpu_seconds_per_1000 == pytest.approx(1000 / window.tokens_per_second)
    assert window.large_forwards_per_1000 is not None
    assert 0 < window.large_forwards_per_1000 < 1000
    assert window.ideal is not None
    assert window.ideal < 1.05 * most_per_second(window)
    assert isinstance(window.extra["handoff_ms"], float)
    assert set(window.wait_ms) == {"small", "large"}
    assert all(times.count >= 10 and 0 < times.p50 < 1e3 for times in window.wait_ms.values())
    assert window.admission_ms is not None
    assert 0 < window.admission_ms.count < window.wait_ms["small"].count
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
    assert window.ttft_ms.count == 2
    per_token = 2e3 / window.tokens_per_second
    assert window.extra["request_estimate_ms"] == pytest.approx(window.ttft_ms.mean + 3999 * per_token)
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
    # A first turn finds what all begin with, 32 of its 64 tokens, a second one all but the last of its 112, in whole pages.
    assert 0.5 <= window.cached["small"] <= 0.9


async def test_a_foreign_server_says_nothing_of_itself(tmp_path: Path) -> None:
    async with FakeServer(length=7).served(tmp_path, tcp=True) as url:
        window = await measure(Target("other", url, "fake", 4), find("5/50"), 2, seconds=0.3, settle=0.05)
    assert window.tokens_per_second > 0
    assert window.gpu_seconds_per_1000 == pytest.approx(4000 / window.tokens_per_second)
    assert (window.tokens_per_model, window.batch, window.step_ms, window.busy) == ({}, {}, {}, {})
    assert (window.ideal, window.handoffs_per_100, window.large_forwards_per_1000) == (None, None, None)
    assert window.extra["gpus"] == 4
    assert int(window.extra["short_answers"]) >= window.requests > 0


async def asked_of(folder: Path, seed: int) -> tuple[list[tuple[int, ...]], list[int]]:
    """Prompts and seeds of one window's requests."""
    server = FakeServer()
    async with server.served(folder) as url:
        await measure(Target("other", url, "fake", 1), find("12/3"), 1, seconds=0.05, settle=0.01, seed=seed)
    bodies = [body for body in server.bodies if body["max_tokens"] == 3]
    return [tuple(body["prompt"]) for body in bodies], [body["seed"] for body in bodies]


async def test_windows_have_new_prompts_and_the_draws_of_their_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, seeds = await asked_of(tmp_path, seed=1)
    more, again = await asked_of(tmp_path, seed=1)
    _, others = await asked_of(tmp_path, seed=2)
    assert len({*prompts, *more}) == len(prompts) + len(more)
    assert all(one == other for one, other in zip(seeds, again, strict=False))
    assert len({*seeds, *others}) == len(seeds) + len(others)
    assert all(0 <= seed < 1 << 31 for seed in seeds)
    # Another process begins to count its windows anew.
    monkeypatch.setattr(window_module, "_number", itertools.count(1))
    first, _ = await asked_of(tmp_path, seed=1)
    monkeypatch.setattr(window_module, "_number", itertools.count(1))
    monkeypatch.setattr(window_module, "NONCE", window_module.NONCE + 1)
    second, _ = await asked_of(tmp_path, seed=1)
    assert not {*first} & {*second}


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
    assert Percentiles.of([0.001, 0.003]) == Percentiles(2.0, 2.0, None, None, 2)
    some, many = (Percentiles.of([0.001] * (count - 1) + [1.0]) for count in (20, 100))
    assert some == Percentiles(pytest.approx(50.95), 1.0, pytest.approx(50.95), None, 20)
    assert many == Percentiles(pytest.approx(10.99), 1.0, pytest.approx(1.0), pytest.approx(10.99), 100)


def test_what_follows_from_counts() -> None:
    seen = Seen(10.0, 1000.0, {}, None, 0, first=[0.1] * 4, gaps=[0.02] * 996, whole=[5.0])
    models = {"small": ModelCounters(700, 1000, 2000, 4.2, 700), "large": ModelCounters(350, 300, 700, 6.3, 700)}
    spent = window_module._Spent(10.5, models, (), {})
    goal = Target("x", "unix:x", "m", 2, large="large")
    window = window_module._window(goal, find("low"), 4, 9, seen, spent, started=None)
    assert (window.tokens_per_second, window.requests, window.seed) == (100, 1, 9)
    assert window.tokens_per_model == {"small": pytest.approx(700 / 10.5), "large": pytest.approx(350 / 10.5)}
    assert window.handoffs_per_100 == pytest.approx(100 * 1400 / 1050)
    assert window.handed == {"small": 0.35, "large": 1.0}
    assert window.batch == {"small": 2.0, "large": pytest.approx(700 / 300)}
    assert window.step_ms == {"small": pytest.approx(4.2), "large": pytest.approx(21)}
    assert window.busy == {"small": pytest.approx(0.4), "large": pytest.approx(0.6)}
    assert (window.gpu_seconds_per_1000, window.large_forwards_per_1000) == (20, pytest.approx(1000 * 300 / 1050))
    assert window.ttft_ms == Percentiles(pytest.approx(100), pytest.approx(100), None, None, 4)
    assert window.request_ms == Percentiles(5000, 5000, None, None, 1)
    estimated = 100 + 2047 * (4 * 10 - 0.4)
    assert window.extra == {
        "gpus": 2,
        "large": "large",
        "counted": 100,
        "request_estimate_ms": pytest.approx(estimated),
    }


def kv_page(tokens: int = 0, had: int = 0, **live: float) -> Scrape:
    totals = {"prefix_tokens": float(tokens), "prefix_cached_tokens": float(had)}
    return Scrape.of(0.0, merge(Stats().families("small", ["small"], live, totals, 0)).decode())


def test_how_many_requests_have_room() -> None:
    pools = kv_page(kv_tokens=146_000)
    check_room("x", find("low"), 126, pools)
    check_room("x", find("high"), 1000, kv_page())  # a server that does not say
    for name, most in (("low", 126), ("high", 34), ("agent", 32)):
        with pytest.raises(
            RoomError, match=f"x: N = 200: .* 146,000 tokens, which is room for {most} requests"
        ) as error:
            check_room("x", find(name), 200, pools)
        assert error.value.most == most


def test_the_part_that_was_cached() -> None:
    assert cached(kv_page(100, 10), kv_page(300, 160)) == {"small": 0.75}
    assert cached(kv_page(100, 10), kv_page(100, 10)) == {}


async def test_what_conversations_begin_with_is_asked_for_before(tmp_path: Path) -> None:
    server, workload = FakeServer(), Workload("two", ((10, 4), (3, 4)), system=6)
    async with server.served(tmp_path) as url:
        await measure(Target("other", url, "fake", 1), workload, 2, seconds=0.05, settle=0.01)
    warming, *asked = [body["prompt"] for body in server.bodies if body["max_tokens"] != 8]
    assert len(warming) == 6
    assert all(prompt[:6] == warming for prompt in asked)


def test_waits_between_two_pages() -> None:
    stats = Stats()
    pages = []
    for begun in (False, True):
        for _ in range(90 * begun):
            stats.handoff_started(0.0003)  # in the bucket from 0.2 to 0.5 ms
        stats.arrival_seconds.observe(0.004, 10)  # from 2 to 5 ms
        families = stats.families("small", ["small"], {}, {}, 0)
        pages.append(Scrape.of(0.0, merge(families).decode()))
    (times,) = (found := waits(*pages)).values()
    assert list(found) == ["small"]
    assert (times.count, times.mean) == (100, pytest.approx(0.67))
    assert times.p50 == pytest.approx(0.2 + 0.3 * 50 / 90)
    assert times.p99 == pytest.approx(2 + 3 * 9 / 10)
    assert admission(*pages) == Percentiles(pytest.approx(4), pytest.approx(3.5), None, None, 10)
    assert waits(pages[0], pages[0]) == {}


def test_beyond_the_last_bound_that_is_what_is_known() -> None:
    assert Percentiles.of_buckets([(1.0, 1.0), (float("inf"), 2.0)], 8.0) == Percentiles(4000, 1000, None, None, 2)
    assert Percentiles.of_buckets([(1.0, 0.0), (float("inf"), 2.0)], 8.0) == Percentiles(4000, 1000, None, None, 2)
    assert Percentiles.of_buckets([], 0.0) is None


def test_the_time_of_an_answer_is_estimated_from_what_a_stream_takes_for_a_token() -> None:
    def seen(tokens: float, first: list[float]) -> Seen:
        return Seen(10.0, tokens, {}, None, 0, first, [], [])

    # Two streams of 10 s at 50 token/s each, and nobody waited for a first token.
    assert estimate(seen(1000, []), 2, 2001, 100) == pytest.approx(100 + 2000 * 20)
    # Four answers began, half a second each: 18 s are left for 900 tokens.
    assert estimate(seen(900, [0.5] * 4), 2, 101, 500) == pytest.approx(500 + 100 * 20)


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
