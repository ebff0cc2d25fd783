"""Several experiments in one command: what they share is started and measured once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.experiment_case import TROUTERD, Case, Stage
from bench.experiment_join import joined
from bench.experiment_peer import VLLM
from bench.experiment_routes import Routes
from bench.experiment_scope import Scope
from bench.experiment_settings import Settings
from bench.experiment_setup import Setup
from bench.experiments import STAGES
from bench.patterns import CITER, COLLM, PATTERNS, R2R, R2R_10, RSTITCH
from bench.throughput import main
from tests.bench.experiment_fakes import case
from tests.bench.fake_system import Clock, Fake

PAIR = ["--small", "Qwen3-0.6B", "--large", "Qwen3-32B", "--devices", "cuda:0"]


def scope(workloads: tuple[str, ...] = ("low",), **given: Any) -> Scope:
    setup = Setup(("Qwen3-0.6B", "Qwen3-32B"), ("cuda:0", "cuda:0"), (1, 1))
    usual: dict[str, Any] = {"setup": setup, "streams": (), "patterns": PATTERNS, "settle": 2.0, "learn": 8.0}
    return Scope(workloads=workloads, **usual | given)


def stages_of(letters: str, own: Scope | None = None) -> dict[str, list[Stage]]:
    return {letter: STAGES[letter](own or scope()) for letter in letters}


def named(stages: list[Stage]) -> dict[str, Stage]:
    return {stage.name: stage for stage in stages}


def windows(stages: list[Stage], letter: str) -> list[str]:
    return [one.key for stage in stages for one in stage.cases if letter in one.experiments]


@pytest.mark.parametrize("letters", ["cdeg", "gedc", "ad", "da", "ace", "fc", "cfa", "bf", "fb", "abcdefg", "gfedcba"])
def test_every_experiment_has_all_of_its_windows_and_each_is_measured_once(letters: str) -> None:
    stages = joined(stages_of(letters))
    for letter, own in stages_of(letters).items():
        assert Counter(windows(stages, letter)) == Counter(one.key for stage in own for one in stage.cases)
    assert len(named(stages)) == len(stages)
    for stage in stages:
        assert all(count == 1 for count in Counter(one.key for one in stage.cases).values())
        # Plans are made by the steps of the models alone.
        if any(len(one.experiments) > 1 for one in stage.cases):
            routed = [stage.routes.of(one.subject) in stage.routes.names for one in stage.cases]
            assert routed == sorted(routed)


def test_stages_that_start_alike_are_one() -> None:
    stages = named(joined(stages_of("cdeg")))
    assert list(stages) == ["trouterd", "std serving", "by itself", "by itself no megakernel"]
    assert stages["trouterd"].routes.names == ("r2r", "every")
    assert [one.key for one in stages["trouterd"].routes.patterns] == ["r2r-35", "r2r-10"]
    found = {one.key: one for one in stages["trouterd"].cases}
    assert found["trouterd/low/large/-/16"].experiments == ("c", "d", "e", "g")
    planned = found["trouterd/low/r2r-35/planned/64"]
    # c drops it at 5, e at 1.
    assert (planned.experiments, planned.importance) == (("c", "e"), 1)
    assert found["trouterd/low/every:4/eager/16"].experiments == ("d",)
    assert {one.experiments for one in stages["by itself"].cases} == {("c", "d", "g"), ("c", "d"), ("c", "g"), ("c",)}
    with_servers = {one.key: one.experiments for one in stages["std serving"].cases}
    assert with_servers["std serving/low/r2r-35/-/16"] == ("c", "g")


@pytest.mark.parametrize("letters", ["ad", "da"])
def test_no_daemon_has_more_than_three_routes(letters: str) -> None:
    stages = joined(stages_of(letters))
    daemons = [stage for stage in stages if stage.name.startswith("trouterd")]
    assert [(stage.name, stage.routes.names) for stage in daemons] == [
        ("trouterd", ("r2r", "citer", "collm")),
        ("trouterd 2", ("rstitch", "every")),
    ]
    for stage in daemons:
        subjects = {one.subject for one in stage.cases} - ({"small", "large"} if stage is daemons[0] else set())
        assert {stage.routes.of(subject) for subject in subjects} == set(stage.routes.names)


def test_one_experiment_is_divided_as_it_was() -> None:
    stages = joined(stages_of("a"))
    assert [stage.name for stage in stages] == [
        "trouterd",
        "trouterd 2",
        "std serving",
        "by itself",
        "by itself no megakernel",
    ]
    assert [one.key for one in stages[1].routes.patterns] == ["rstitch"]
    assert {one.subject for one in stages[1].cases} == {"rstitch"}
    assert stages[2].routes.names == ("r2r", "citer", "collm", "rstitch"), "it has no routes in a daemon"
    (own,) = stages_of("e")["e"]
    (same,) = joined({"e": [own]})
    assert [replace(one, experiments=()) for one in same.cases] == list(own.cases)


def test_daemons_of_one_name_that_differ_are_not_mixed_up() -> None:
    """Plans of f go by what its windows have measured, those of c by what is assumed."""
    stages = named(joined(stages_of("cf")))
    key = "trouterd/low/r2r-35/planned/16"
    assert {one.experiments for one in stages["trouterd"].cases} == {("c",)}
    assert {one.experiments for one in stages["trouterd 2"].cases} == {("f",)}
    assert all(key in [one.key for one in stages[name].cases] for name in ("trouterd", "trouterd 2"))


def test_systems_of_one_name_that_differ_are_not_mixed_up() -> None:
    """Each is what it is started from, whether it has routes or not."""

    def systems(stages: list[Stage]) -> list[str]:
        return [stage.name for stage in stages if not stage.name.startswith(TROUTERD)]

    peer = Path("/nowhere")
    own, again = scope(vllm=peer), scope(vllm=peer)
    names = systems(joined({"a": STAGES["a"](own)}))
    assert names == ["std serving", "by itself", "by itself no megakernel", VLLM]
    both = joined({"a": STAGES["a"](own), "c": STAGES["a"](again)})
    assert systems(both) == names
    settings = Settings.read(["large.depth=1"], ("small", "large"))
    for other in (
        scope(vllm=peer, setup=replace(own.setup, settings=settings)),
        scope(vllm=peer, setup=replace(own.setup, sources=("Qwen3-0.6B", "Qwen3-8B"))),
    ):
        stages = joined({"a": STAGES["a"](own), "c": STAGES["a"](other)})
        assert all(len({one.experiments for one in stage.cases}) == 1 for stage in stages if stage.name != VLLM)
        assert [name for name in systems(stages) if name.endswith(" 2")][:3] == [f"{name} 2" for name in names[:3]]
    for more in (scope(vllm=peer, streams=(4, 8)), scope(vllm=peer, patterns=(CITER,)), scope(vllm=Path("/other"))):
        stages = joined({"a": STAGES["a"](own), "c": STAGES["a"](more)})
        assert f"{VLLM} 2" in systems(stages)


def test_pools_are_told_by_the_models_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Std. Serving takes those, whichever daemons ran in between."""
    given = []
    monkeypatch.setattr("bench.experiment_scope.opened_fleet", lambda *arguments: given.append(arguments[-1]))
    own = scope()
    for stage in joined(stages_of("cf", own)):
        if stage.routes.names and stage.name != "std serving":
            stage.opened(tmp_path)
    assert len(given) > 5
    assert [pools is own.pools for pools in given] == [True, True] + [False] * (len(given) - 2)


def test_a_window_is_as_long_as_the_longest_needs_it() -> None:
    short = case("large", 4, seconds=3.0, settle=0.3, prefill=2.0, importance=7)
    (stage,) = joined({"c": [stage_of(short)], "e": [stage_of(case("large", 4, seconds=10.0, settle=1.0))]})
    (found,) = stage.cases
    assert found == replace(short, seconds=10.0, settle=1.0, prefill=2.0, importance=0, experiments=("c", "e"))
    (stage,) = joined({"c": [stage_of(short)], "e": [stage_of(case("large", 4))]})
    assert stage.cases[0].seconds == 0, "as long as all others"


def stage_of(*cases: Case) -> Stage:
    return Fake(Clock()).stage("trouterd", list(cases))


def test_routes_are_divided_and_joined() -> None:
    routes = Routes((R2R, CITER, RSTITCH)).joined(Routes((R2R_10, R2R, COLLM)))
    assert [one.key for one in routes.patterns] == ["r2r-35", "citer", "rstitch", "r2r-10", "collm"]
    first, second = routes.parts(3)
    assert [one.key for one in first.patterns] == ["r2r-35", "citer", "rstitch", "r2r-10"]
    assert second.names == ("collm",)
    assert Routes().parts(3) == [Routes()]
    assert [routes.of(subject) for subject in ("r2r-10", "every:8", "large")] == ["r2r", "every", "large"]


def test_list_has_each_stage_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Long answers are for g alone, as without the others."""
    usual = [
        *PAIR,
        "--settle",
        "2",
        "--learn",
        "8",
        "--context",
        "10240",
        "--start",
        "38",
        "--no-std-servers",
        "--list",
    ]
    assert main(["--experiment", "c,d,e,g", *usual]) == 0
    lines = capsys.readouterr().out.splitlines()
    starts = [line for line in lines if line.endswith("to start")]
    assert starts == [f"{name}: 38 s to start" for name in ("trouterd", "by itself", "by itself no megakernel")]
    assert "  trouterd/low/large/-/1   importance 0, 12.1 s, for c,d" in lines
    assert {line.rpartition(" ")[2] for line in lines if "/high/" in line} == {"g"}
    together = float(lines[-1].split()[0])
    apart = 0.0
    for letter in "cdeg":
        assert main(["--experiment", letter, *usual]) == 0
        apart += float(capsys.readouterr().out.splitlines()[-1].split()[0])
    assert together < apart - 7 * 38
    assert main(["--experiment", "c,d,e,g", *usual, "--budget", "500"]) == 0
    lines = capsys.readouterr().out.splitlines()
    ranks: dict[bool, list[int]] = {True: [], False: []}
    for line in lines:
        if "importance " in line:
            ranks[line.endswith("dropped")].append(int(line.split("importance ")[1].split(",")[0]))
    assert max(ranks[False]) <= min(ranks[True])
