"""Deployments as configurations, and what a fleet says of scripted models."""

from __future__ import annotations

import asyncio
import os
import signal
import tomllib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from bench.ablations import ABLATIONS, ablated, without
from bench.deployment import Deployment, Fleet, ModelSpec, RouteSpec, serving
from bench.step_synchronous import step_synchronous
from bench.target import Target
from tests.bench.client import answers, written
from trouterd import settings
from trouterd.batching.report import Report
from trouterd.check import deep_problems
from trouterd.demo import LARGE_DIRECTORY

STREAMS = 4
SCRIPTED = Deployment(
    models=(ModelSpec("small", "script:4"), ModelSpec("large", "script:9")),
    routes=(RouteSpec("visit", ("small", "large"), "bernoulli", "p = 0.35"),),
    settings=('batching.mode = "eager"',),
)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with serving(SCRIPTED, tmp_path_factory.mktemp("f")) as running:
        yield running


def test_configuration(tmp_path: Path) -> None:
    deployment = Deployment(
        models=(
            ModelSpec("a", str(LARGE_DIRECTORY), settings=("depth = 2", "threads = 1", "depth = 3")),
            ModelSpec("b", "Qwen3-0.6B", "cuda:1", tensor_parallel=2),
            ModelSpec("c", "Qwen3-8B", "cuda:1"),
            ModelSpec("d", "builtin:small"),
            ModelSpec("e", "script:2.5", "cuda:3"),
        ),
        routes=(RouteSpec("r", ("a", "d"), "every_n", 'shape = "visit", n = 3'),),
        settings=("[gpu]", 'mps = "off"', "[batching]\nrelax = true", "[gpu]", "memory_fraction = 0.5", 'mps = "auto"'),
    )
    tree = tomllib.loads(deployment.configuration(tmp_path))
    assert tree["models"]["a"] == {
        "path": str(LARGE_DIRECTORY),
        "device": "cpu",
        "tensor_parallel": 1,
        "depth": 3,
        "threads": 1,
    }
    assert tree["gpu"] == {"mps": "auto", "memory_fraction": 0.5}
    assert tree["batching"] == {"relax": True}
    assert tree["routes"]["r"] == {
        "models": ["a", "d"],
        "algorithm": "every_n",
        "params": {"shape": "visit", "n": 3},
    }
    assert tree["models"]["b"]["load_format"] == "dummy"
    assert tree["models"]["b"]["tokenizer"] == tree["models"]["c"]["tokenizer"]
    assert (Path(tree["models"]["c"]["path"]) / "config.json").is_file()
    assert (deployment.gpus("bc"), deployment.gpus("c"), deployment.gpus("ad"), deployment.gpus("abce")) == (2, 1, 2, 4)
    file = tmp_path / "trouterd.toml"
    file.write_text(deployment.configuration(tmp_path))
    assert settings.load(file, {}, check=False).models["e"].format == "script"


def test_a_process_that_was_lost_is_waited_for(tmp_path: Path) -> None:
    with serving(SCRIPTED, tmp_path) as fleet:
        (process,) = (one for one in fleet.call("status")["processes"] if one["name"] == "large")
        os.kill(process["pid"], signal.SIGKILL)
        while fleet.call("status")["state"] == "ready":
            pass
        with pytest.raises(RuntimeError, match="the daemon is degraded, and not ready"):
            fleet.wait_ready(0.0)
        fleet.wait_ready()
        (again,) = (one for one in fleet.call("status")["processes"] if one["name"] == "large")
        assert again["pid"] != process["pid"]


def test_targets(fleet: Fleet) -> None:
    kinds = {name: (target.model, target.gpus, target.large) for name, target in fleet.targets.items()}
    assert kinds == {
        "small": ("small", 1, ""),
        "large": ("large", 1, "large"),
        "visit": ("visit", 2, "large"),
    }


def grown(fleet: Fleet, target: Target, count: int, tokens: int) -> dict[str, tuple[int, float, int]]:
    """Tokens, requests a step and hand-offs that answers add to each model's counters."""
    assert target.counters is not None
    before = target.counters()
    asyncio.run(answers(target, count, max_tokens=tokens, ignore_eos=True))
    after = target.counters()
    assert after.now > before.now
    found = {}
    for name, one in after.models.items():
        old = before.models[name]
        assert one.busy_seconds > old.busy_seconds
        rows = (one.step_requests - old.step_requests) / (one.steps - old.steps)
        found[name] = one.tokens - old.tokens, rows, one.handoffs - old.handoffs
    return found


def test_counters(fleet: Fleet) -> None:
    visit = grown(fleet, fleet.targets["visit"], STREAMS, 50)
    assert visit.keys() == {"small", "large"}
    assert sum(tokens for tokens, _, _ in visit.values()) == 50 * STREAMS
    assert visit["small"][2] == visit["large"][0], "each visit gives one token"
    alone = grown(fleet, fleet.targets["large"], 2, 30)
    assert alone.keys() == {"large"}
    assert (alone["large"][0], alone["large"][2]) == (60, 0)


def test_pinned_thresholds_are_in_force(fleet: Fleet) -> None:
    with fleet.holding({"batching.mode": "eager"}):
        fleet.pin({"small": 1, "large": 3}, STREAMS)
        shown = fleet.call("batching")["models"]
        assert shown["large"]["mode"] == "manual"
        assert shown["large"]["thresholds"] == [1, 2, 3, 3]
        assert shown["small"]["thresholds"] == []
        assert grown(fleet, fleet.targets["visit"], STREAMS, 40)["large"][1] > 1.8
        with pytest.raises(RuntimeError, match="all models could wait at once"):
            fleet.pin({"small": 4, "large": 3}, STREAMS)
    assert fleet.call("batching")["models"]["large"]["mode"] == "eager"


def overlap(fleet: Fleet, target: Target) -> float:
    """Seconds during which steps of both models ran, over those of all steps, while some answers are written."""
    fleet.call("batching-report")  # what ran before
    both = total = 0.0

    async def watched() -> None:
        nonlocal both, total
        asking = asyncio.ensure_future(answers(target, STREAMS, max_tokens=40, ignore_eos=True))
        while not asking.done():
            await asyncio.wait([asking], timeout=0.3)
            answered = await asyncio.to_thread(fleet.call, "batching-report")
            small, large = (msgspec.convert(answered[name], Report).steps for name in ("small", "large"))
            total += sum(step.seconds for step in (*small, *large))
            both += sum(
                max(0.0, min(a.begin + a.seconds, b.begin + b.seconds) - max(a.begin, b.begin))
                for a in small
                for b in large
            )

    asyncio.run(watched())
    return both / total


def test_without_async_no_two_models_run_at_once(fleet: Fleet) -> None:
    target = fleet.targets["visit"]
    expected = list(map(written, asyncio.run(answers(target, 2, max_tokens=20, ignore_eos=True))))
    assert overlap(fleet, target) > 0.1
    with without(fleet, "no async", "no delayed batching"):
        assert overlap(fleet, target) < 0.02
        given = asyncio.run(answers(target, 2, max_tokens=20, ignore_eos=True))
    assert list(map(written, given)) == expected
    assert overlap(fleet, target) > 0.1


@pytest.mark.parametrize("writes_on", [False, True])
def test_step_synchronous(fleet: Fleet, writes_on: bool) -> None:
    target = fleet.targets["visit"]
    expected = list(map(written, asyncio.run(answers(target, 2, max_tokens=20, ignore_eos=True))))
    before = fleet.call("batching")["models"]
    with step_synchronous(fleet, "visit", STREAMS, writes_on=writes_on) as rounds:
        assert rounds.name == "step-synchronous visit"
        assert list(map(written, asyncio.run(answers(rounds, 2, max_tokens=20, ignore_eos=True)))) == expected
        requests_a_step = grown(fleet, rounds, STREAMS, 300)["small"][1]
        assert overlap(fleet, rounds) < 0.02
    # All of them, but for the first steps and the last ones: on a busy host requests do not arrive together.
    assert requests_a_step > (0.6 if writes_on else 0.8) * STREAMS
    after = fleet.call("batching")["models"]
    assert all(after[name][key] == before[name][key] for name in before for key in ("mode", "thresholds"))
    assert fleet.live("models.small.linger_ms", 0.0) == 0.0


@pytest.mark.parametrize("name", ABLATIONS)
def test_every_ablation_is_a_valid_configuration(tmp_path: Path, name: str) -> None:
    demo = Deployment(
        models=(ModelSpec("small", "builtin:small", settings=("depth = 2",)), ModelSpec("large", "builtin:large")),
        routes=(RouteSpec("visit", ("small", "large"), "bernoulli", "p = 0.35"),),
        settings=("[batching]", 'mode = "auto"', "relax = true"),
    )
    file = tmp_path / "trouterd.toml"
    file.write_text(demo.configuration(tmp_path))
    whole = settings.load(file, {})
    file.write_text(ablated(demo, name).configuration(tmp_path))
    config = settings.load(file, {})
    assert deep_problems(config) == []
    changed = {key for key, _ in settings.differences(whole, config)}
    keys = {f"models.{model}.{key}" for model in ("small", "large") for key in ABLATIONS[name].models}
    assert changed == keys | ABLATIONS[name].daemon.keys()


def test_several_parts_are_left_out_together(tmp_path: Path, fleet: Fleet) -> None:
    file = tmp_path / "trouterd.toml"
    file.write_text(ablated(SCRIPTED, *ABLATIONS).configuration(tmp_path))
    config = settings.load(file, {})
    assert (config.batching.mode, config.batching.overlap, config.gpu.mps) == ("eager", False, "off")
    assert {(m.graphs, m.extend_graphs, m.depth) for m in config.models.values()} == {(False, False, 1)}
    assert [name for name, one in ABLATIONS.items() if one.is_live] == ["no async", "no delayed batching"]
    with (
        pytest.raises(ValueError, match="no graphs, no MPS: fixed at the start of a daemon"),
        without(fleet, "no graphs", "no async", "no MPS"),
    ):
        pass
