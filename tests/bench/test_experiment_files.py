"""Several experiments in one command: each has a whole file of its own, and a report takes them for one run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.experiment_case import Case
from bench.experiment_group import Group
from bench.experiment_report import write_report
from bench.experiment_result import Result, read_results
from bench.kv_pools import RoomError
from bench.target import Target
from bench.throughput import main
from tests.bench.experiment_fakes import case, record, result, saved
from tests.bench.fake_system import SECONDS, Clock, Fake

SHARED = case("large", 4)
OF_C = [SHARED, case("r2r-35", 4, "planned", importance=10)]
OF_E = [replace(SHARED, importance=5), case("r2r-35", 4, "eager", importance=20)]


@pytest.fixture
def fake() -> Fake:
    return Fake(Clock())


def run(fake: Fake, folder: Path, budget: float = 1e9) -> tuple[Result, Result]:
    stages = {"c": [fake.stage("trouterd", OF_C)], "e": [fake.stage("trouterd", OF_E)]}
    of_c, of_e = fake.run_together(stages, {letter: folder / f"{letter}.json" for letter in stages}, budget)
    assert {one.head["experiment"]: one for one in read_results(folder)} == {"c": of_c, "e": of_e}
    return of_c, of_e


def test_a_shared_window_is_in_both_files(fake: Fake, tmp_path: Path) -> None:
    of_c, of_e = run(fake, tmp_path)
    assert fake.started == ["trouterd"]
    assert fake.asked == [SHARED.key, OF_C[1].key, OF_E[1].key]
    assert [one.case.key for one in of_c.records] == [one.key for one in OF_C]
    assert [one.case.key for one in of_e.records] == [one.key for one in OF_E]
    assert of_c.records[0] == of_e.records[0]
    assert of_c.complete
    assert of_e.complete
    assert "[3/3] " in fake.printed.getvalue()


def test_each_file_has_its_own_dropped_and_failed(fake: Fake, tmp_path: Path) -> None:
    of_c, of_e = run(fake, tmp_path, budget=30 + 2 * (SECONDS + 1))
    assert (of_c.dropped, of_c.complete) == ([], True)
    assert (of_e.dropped, of_e.complete) == ([OF_E[1].key], False)
    fake.broken = OF_C[1].key
    of_c, of_e = run(fake, tmp_path)
    assert [key for key, _ in of_c.failures] == [fake.broken]
    assert (of_e.failures, of_e.complete) == ([], True)
    fake.broken = SHARED.key
    assert all(one.failures == [(SHARED.key, "no such route")] for one in run(fake, tmp_path))


def test_a_run_that_is_cut_off_keeps_both_files(fake: Fake, tmp_path: Path) -> None:
    measure = fake.measure

    def cut_off(target: Target, one: Case) -> dict[str, Any]:
        if len(fake.asked) == 2:
            raise KeyboardInterrupt
        return measure(target, one)

    fake.measure = cut_off  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        run(fake, tmp_path)
    kept = {one.head["experiment"]: len(one.records) for one in read_results(tmp_path)}
    assert kept == {"c": 2, "e": 1}


def test_where_there_is_less_room_no_file_has_a_window_twice(fake: Fake, tmp_path: Path) -> None:
    measure = fake.measure

    def limited(target: Target, one: Case) -> dict[str, Any]:
        if one.streams > 3:
            raise RoomError("unix:/nowhere", one.streams, 3, 1000)
        return measure(target, one)

    fake.measure = limited  # type: ignore[method-assign]
    many, more = case("large", 8), case("large", 16)
    stages = {"c": [fake.stage("trouterd", [many, more])], "e": [fake.stage("trouterd", [more])]}
    made = fake.run_together(stages, {letter: tmp_path / f"{letter}.json" for letter in stages})
    assert [[(one.case.key, one.facts["asked_streams"]) for one in found.records] for found in made] == [
        [("trouterd/low/large/-/3", 8)],
        [("trouterd/low/large/-/3", 16)],
    ]


def test_files_of_one_command_are_one_run(tmp_path: Path) -> None:
    alone, routed = record(case("large", 4), 100.0), record(case("r2r-35", 4, "planned"), 150.0)
    of_c = result("c", [record(case("large", 4, system="by itself"), 120.0)], nonce=7)
    for nonce, mark in ((7, ""), (8, "\\*")):
        of_e = result("e", [alone, routed], nonce=nonce)
        group = Group([of_c, of_e])
        (one,) = group.select(subject="r2r-35")
        assert [str(group.ratio(one, subject="large", system=system)) for system in ("by itself", "trouterd")] == [
            f"1.25{mark}",
            "1.50",
        ]
        text = write_report(saved(tmp_path / str(nonce), of_c, of_e))
        assert f"(1.25{mark} times the baseline)" in text
    # Of a window that both have, each is compared with its own.
    again = result("f", [record(case("large", 4), 50.0)], nonce=7)
    group = Group([result("e", [alone, routed], nonce=7), again])
    assert str(group.ratio(group.select(subject="r2r-35")[0], subject="large")) == "1.50"


def test_a_note_of_several_experiments_is_told_once(tmp_path: Path) -> None:
    both = [record(case("large", 4), 100.0), record(case("r2r-35", 4, "planned"), 150.0)]
    made = [result(letter, both, nonce=7, note="a cold card") for letter in "ce"]
    text = write_report(saved(tmp_path, *made))
    assert text.count("a cold card") == 1
    assert "**Experiments c, e, 2026-11-30T10:00:00Z**: a cold card" in text


@pytest.mark.slow
def test_two_experiments_on_scripts(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    models = ["--small", "script:2", "--large", "script:8"]
    quick = ["--seconds", "0.5", "--settle", "0.2", "--learn", "0.5", "--workloads", "20/2000", "--streams", "4"]
    quick += ["--patterns", "r2r-35", "--no-std-servers"]
    assert main(["--experiment", "c,e", *models, *quick, "--output", str(tmp_path)]) == 0
    told = capfd.readouterr().err
    assert told.count(" ready: unix:") == 2, "one daemon for both, and one of the large model by itself"
    assert "[11/11] by itself/" in told
    of_c, of_e = read_results(tmp_path)
    assert (of_c.head["experiment"], of_e.head["experiment"]) == ("c", "e")
    assert of_c.head | {"experiment": "e"} == of_e.head
    in_both = [one for one in of_c.records if one in of_e.records]
    assert [one.case.key.partition("20/2000/")[2] for one in in_both] == [
        "large/-/4",
        "small/-/4",
        "r2r-35/planned/4",
        "r2r-35/eager/4",
    ]
    assert main(["--report", str(tmp_path)]) == 0
    text = capfd.readouterr().out
    assert "## From one stream to many" in text
    assert "## Wrong thresholds" in text
