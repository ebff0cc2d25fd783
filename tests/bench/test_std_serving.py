"""Std. Serving on the demo pair: one token a call gives what a model, or a routed trouterd, gives."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from algorithms.registry import AlgorithmError
from bench.blind_routes import blind_routes
from bench.deployment import Deployment, Fleet, ModelSpec, RouteSpec, serving
from bench.std_serving import DispatcherError, _alone, std_serving, std_serving_on
from bench.step_shapes import write_shape
from bench.target import Target
from tests.bench.client import answers, streamed, written
from trouterd.config import Batching, Config, Model
from trouterd.demo import SMALL_DIRECTORY
from trouterd.settings import load
from trouterd.worker.gpu_check import Gpu, Host

WANDER = str(Path(__file__).parents[1] / "algorithms" / "wander_tensor.py")
DEMO = Deployment(
    models=(
        ModelSpec("small", "builtin:small"),
        ModelSpec("copy", "builtin:small"),
        ModelSpec("large", "builtin:large"),
    ),
    routes=(
        RouteSpec("same", ("small", "copy"), "bernoulli", "p = 0.35"),
        RouteSpec("visit", ("small", "large"), "bernoulli", "p = 0.35"),
        # The large model keeps what it writes, and writes on.
        RouteSpec("stay", ("small", "large"), WANDER, "restless = 0.3, keep = [false, true]"),
        RouteSpec("mixture", ("small", "copy", "large"), "me", "weights = [0.5, 0.3, 0.2]"),
    ),
)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with serving(DEMO, tmp_path_factory.mktemp("f")) as running:
        yield running


@pytest.fixture(scope="module")
def std(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Target]]:
    with std_serving_on(fleet, tmp_path_factory.mktemp("s")) as targets:
        yield targets


def test_copies_of_one_model_write_its_own_answer(fleet: Fleet, std: Mapping[str, Target]) -> None:
    prompt = "A farmer has 5 boxes with 7 apples each and eats 3 apples."
    asked: dict[str, Any] = {"prompt": prompt, "max_tokens": 60}
    own, by_calls = (asyncio.run(answers(target, **asked))[0] for target in (fleet.targets["small"], std["same"]))
    assert own["choices"][0]["finish_reason"] == by_calls["choices"][0]["finish_reason"]
    assert own["choices"][0]["token_ids"] == by_calls["choices"][0]["token_ids"]
    assert own["choices"][0]["text"] == by_calls["choices"][0]["text"]
    assert {"small", "copy"} == set(by_calls["choices"][0]["models"])


@pytest.mark.parametrize("route", ["same", "visit", "stay", "mixture"])
def test_moves_are_those_of_the_routed_daemon(fleet: Fleet, std: Mapping[str, Target], route: str) -> None:
    asked = {"max_tokens": 40, "ignore_eos": True}
    routed, by_calls = (asyncio.run(answers(target, 3, **asked)) for target in (fleet.targets[route], std[route]))
    assert list(map(written, routed)) == list(map(written, by_calls))
    assert len({tuple(answer["choices"][0]["models"]) for answer in routed}) == 3, "every seed has its own moves"
    for one, other in zip(routed, by_calls, strict=True):
        assert one["usage"]["route"]["tokens"] == other["usage"]["route"]["tokens"]
        assert one["usage"]["route"]["handoffs"] == other["usage"]["route"]["handoffs"]


def test_overrides_of_a_request_move_it(std: Mapping[str, Target]) -> None:
    for p, writer in ((0.0, "small"), (1.0, "large")):
        answer = asyncio.run(answers(std["visit"], max_tokens=6, ignore_eos=True, route={"params": {"p": p}}))[0]
        assert answer["choices"][0]["models"] == [writer] * 6


def test_min_tokens_and_stop_ids_hold_over_the_calls(fleet: Fleet, std: Mapping[str, Target]) -> None:
    ids, _, _ = written(asyncio.run(answers(fleet.targets["small"], max_tokens=20, ignore_eos=True))[0])
    stop = ids[4]
    for least in (0, 12):
        asked: dict[str, Any] = {"stop_token_ids": [stop], "min_tokens": least}
        expected, given = (
            asyncio.run(answers(target, max_tokens=20, ignore_eos=True, **asked))[0]
            for target in (fleet.targets["small"], std["same"])
        )
        assert expected["choices"][0]["token_ids"] == given["choices"][0]["token_ids"]
        assert expected["choices"][0]["finish_reason"] == given["choices"][0]["finish_reason"]


@pytest.mark.slow
def test_draws_of_a_request_differ_from_token_to_token(std: Mapping[str, Target]) -> None:
    asked: dict[str, Any] = {"max_tokens": 30, "ignore_eos": True, "temperature": 2.0}
    first, again = (asyncio.run(answers(std["same"], **asked))[0] for _ in range(2))
    assert written(first) == written(again)
    assert len(set(written(first)[0])) > 10


def test_a_stream_ends_with_its_usage(std: Mapping[str, Target]) -> None:
    text, usage = asyncio.run(streamed(std["visit"], max_tokens=12, ignore_eos=True))
    assert text
    assert usage["completion_tokens"] == 12
    assert sum(usage["route"]["tokens"].values()) == 12


def test_counters_add_up(std: Mapping[str, Target]) -> None:
    target = std["visit"]
    assert target.counters is not None
    before = target.counters().models
    given = asyncio.run(answers(target, 2, max_tokens=30, ignore_eos=True))
    after = target.counters().models
    for name in ("small", "large"):
        assert after[name].tokens - before[name].tokens == sum(a["usage"]["route"]["tokens"][name] for a in given)
        forwards = sum(a["usage"]["route"]["forwards"][name] for a in given)
        assert after[name].step_requests - before[name].step_requests == forwards, "each call is a row of a step"
        assert after[name].busy_seconds > before[name].busy_seconds
    moved = sum(after[name].handoffs - before[name].handoffs for name in ("small", "large"))
    assert moved == sum(a["usage"]["route"]["handoffs"] for a in given)
    assert (target.gpus, target.large) == (2, "large")


def test_a_client_that_goes_away_ends_its_calls(fleet: Fleet, std: Mapping[str, Target]) -> None:
    async def leave() -> None:
        asking = asyncio.create_task(answers(std["visit"], max_tokens=500, ignore_eos=True))
        await asyncio.sleep(0.3)
        assert not asking.done()
        asking.cancel()
        await asyncio.wait([asking])

    def calls() -> int:
        return sum(worker["steps"] for worker in fleet.call("status")["workers"].values())

    begin = before = calls()
    asyncio.run(leave())
    # Quiet for a second, or for so long that all of the answer has been written.
    while before != (now := calls()) and now - begin < 500:
        before = now
        time.sleep(1)
    assert now - begin < 500
    assert fleet.call("requests")["requests"] == []


@pytest.mark.slow
def test_servers_of_their_own(tmp_path: Path) -> None:
    models = (ModelSpec("small", "script:0"), ModelSpec("large", "script:1"))
    route = RouteSpec("r", ("small", "large"), "bernoulli", "p = 0.5")
    with std_serving(Deployment(models, (route,)), tmp_path) as targets:
        (answer,) = asyncio.run(answers(targets["r"], max_tokens=64, ignore_eos=True))
        counters = targets["r"].counters
        assert counters is not None
        counted = counters().models
    ids, writers, _ = written(answer)
    # To a server every token is an answer's first.
    assert [{"small": 100, "large": 200}[writer] for writer in writers] == ids
    assert {name: one.tokens for name, one in counted.items()} == answer["usage"]["route"]["tokens"]
    assert counted["small"].steps == 64, "also for tokens that the large model writes"
    assert counted["large"].steps == answer["usage"]["route"]["tokens"]["large"]


@pytest.mark.slow
def test_what_cannot_be_decided_outside_is_refused(
    tmp_path: Path, fleet: Fleet, capfd: pytest.CaptureFixture[str]
) -> None:
    routes = [RouteSpec("unsure", ("small", "large"), "entropy", "threshold = 0.2")]
    with pytest.raises(DispatcherError, match="exited with code 1"), std_serving_on(fleet, tmp_path, routes):
        pass
    said = capfd.readouterr().err
    assert (
        "routes.unsure.algorithm: an external dispatcher cannot decide for 'entropy', which looks at a step's logits"
        in said
    )
    bare = replace(DEMO, models=tuple(replace(one, settings=("prefix_cache = false",)) for one in DEMO.models))
    with (
        pytest.raises(ValueError, match=r"models\.small\.prefix_cache is off"),
        std_serving_on(Fleet(bare, fleet.served, fleet._link), tmp_path),
    ):
        pass


@pytest.mark.parametrize(
    ("algorithm", "params", "reason"),
    [
        ("speculative", "", "keeps state of requests"),
        ("rstitch", "tau = 0.1", "looks at a step's logits"),
    ],
)
def test_only_blind_algorithms_are_taken(tmp_path: Path, algorithm: str, params: str, reason: str) -> None:
    deployment = replace(DEMO, routes=(RouteSpec("r", ("small", "large"), algorithm, params),))
    file = tmp_path / "t.toml"
    file.write_text(deployment.configuration(tmp_path))
    with pytest.raises(AlgorithmError, match=reason):
        blind_routes(load(file, {}), dict.fromkeys(("small", "copy", "large"), frozenset()), 1024)


def test_servers_that_share_a_gpu_divide_it_as_one_daemon_does(tmp_path: Path) -> None:
    host = Host((Gpu("NVIDIA H200", (9, 0), 141 * 10**9),) * 2, triton=True)
    paths = {name: write_shape(name, tmp_path / name) for name in ("Qwen3-0.6B", "Qwen3-8B")}

    def on_gpu(name: str, **keys: Any) -> Model:
        return Model(path=str(paths[name]), device="cuda:0", tokenizer=str(SMALL_DIRECTORY), **keys)

    models = {"small": on_gpu("Qwen3-0.6B", kv_tokens=4096), "large": on_gpu("Qwen3-8B", kv_tokens=4096)}

    def alone(name: str, *, overlap: bool = True, **changes: Model) -> Model:
        file = tmp_path / "alone.toml"
        file.write_text(_alone(name, Config(models=models | changes, batching=Batching(overlap=overlap)), host))
        config = load(file, {})
        assert (list(config.models), config.routes, config.batching.mode) == ([name], {}, "eager")
        return config.models[name]

    assert alone("large").megakernel == "off"
    assert (alone("small").megakernel, alone("small").megakernel_percent) == ("auto", 40)
    without = on_gpu("Qwen3-0.6B", kv_tokens=4096, megakernel="off")
    assert alone("large", small=without).megakernel_percent == 40
    far = msgspec.structs.replace(models["large"], device="cuda:1")
    assert (alone("small", large=far).megakernel_percent, alone("large", large=far).megakernel) == (0, "auto")
    # What takes turns in a daemon runs side by side in servers.
    assert alone("small", overlap=False).megakernel_percent == 40
    on = {name: msgspec.structs.replace(model, megakernel="on") for name, model in models.items()}
    with pytest.raises(
        ValueError, match=r"models\.large\.megakernel: servers of their own take no turns; divide the GPU of small"
    ):
        alone("large", overlap=False, **on)
    parts = {name: msgspec.structs.replace(model, megakernel_percent=50) for name, model in on.items()}
    assert alone("large", overlap=False, **parts).megakernel_percent == 50
    with pytest.raises(ValueError, match=r"models\.large\.kv_tokens: the servers of small and large share a GPU"):
        alone("large", large=on_gpu("Qwen3-8B"))
