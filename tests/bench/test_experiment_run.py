"""What an experiment measures, in which order, and what it leaves out for lack of time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.experiment_case import AROUND, Case, CaseError, Stage, cost, matching, within
from bench.experiment_result import ResultError, new_file, read_results
from bench.experiment_routes import Routes
from bench.experiment_steps import StepTimes
from bench.kv_pools import RoomError
from bench.target import Target
from tests.bench.experiment_fakes import case, record, result, saved
from tests.bench.fake_system import SECONDS, Clock, Fake

CASES = [
    case("large", 1),
    case("large", 4),
    case("r2r-35", 1, "planned", importance=10),
    case("r2r-35", 4, "planned", importance=10),
    case("r2r-35", 4, "auto", importance=20, settle=20.0),
]
OTHER = [case("r2r-35", 4, system="std serving", importance=15)]


@pytest.fixture
def fake() -> Fake:
    return Fake(Clock())


def test_everything_in_order(fake: Fake, tmp_path: Path) -> None:
    steps = StepTimes()
    made = fake.run([fake.stage("trouterd", CASES), fake.stage("other", OTHER)], tmp_path / "a.json", steps=steps)
    assert fake.started == ["trouterd", "other"]
    assert fake.asked == [one.key for one in (*CASES, *OTHER)]
    assert [record.case.key for record in made.records] == fake.asked
    assert made.complete
    printed = fake.printed.getvalue()
    assert "[3/6] trouterd/low/r2r-35/planned/1: 100 token/s; gap p99 4.0 ms; B 1, 1; predicted 5" in printed
    # Windows of a model alone are step times for the planner.
    (large,) = steps.of("low", ["large"])
    assert large.decode.points == ((1.0, 0.015),)
    with pytest.raises(CaseError, match="no step time of the model small"):
        steps.of("low", ["large", "small"])
    (again,) = read_results(tmp_path)
    assert again == made


def test_the_file_is_there_before_the_end(fake: Fake, tmp_path: Path) -> None:
    path, seen = tmp_path / "a.json", []
    measure = fake.measure

    def cut_off(target: Target, one: Case) -> dict[str, Any]:
        seen.append(len(json.loads(path.read_text())["records"]))
        if len(seen) == 3:
            raise KeyboardInterrupt
        return measure(target, one)

    fake.measure = cut_off  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        fake.run([fake.stage("trouterd", CASES)], path)
    assert seen == [0, 1, 2]
    (kept,) = read_results(tmp_path)
    assert [record.case.key for record in kept.records] == [one.key for one in CASES[:2]]
    assert not kept.complete


def test_a_budget_drops_the_least_important(fake: Fake, tmp_path: Path) -> None:
    # Room for the first four: 30 s to start, 11 s each; the learning window and the other stage go.
    made = fake.run([fake.stage("trouterd", CASES), fake.stage("other", OTHER)], tmp_path / "a.json", 30 + 4 * 11)
    assert fake.started == ["trouterd"]
    assert fake.asked == [one.key for one in CASES[:4]]
    assert made.dropped == [CASES[4].key, OTHER[0].key]
    assert not made.complete
    # What is dropped at once takes one line, the other stage's windows with it.
    last = fake.printed.getvalue().splitlines()[-1]
    assert last == f"[6/6] no time left: 2 dropped: {CASES[4].key}, {OTHER[0].key}"


def test_a_slow_start_drops_more(fake: Fake, tmp_path: Path) -> None:
    stage = fake.stage("trouterd", CASES[:4], seconds=30.0)
    slow = replace(stage, seconds=10.0)
    made = fake.run([slow], tmp_path / "a.json", 10 + 4 * 11)
    assert fake.asked == [CASES[0].key, CASES[1].key]
    assert made.dropped == [CASES[3].key, CASES[2].key]


def test_time_that_is_left_over_is_used(fake: Fake, tmp_path: Path) -> None:
    """What does not fit at first is dropped at the end of its stage only."""
    stage = fake.stage("trouterd", CASES[:4], seconds=10.0)
    quick = replace(stage, seconds=30.0)
    made = fake.run([quick, fake.stage("other", OTHER)], tmp_path / "a.json", 30 + 3 * 11)
    assert fake.asked == [one.key for one in CASES[:4]]
    assert made.dropped == [OTHER[0].key]


def test_short_windows(fake: Fake, tmp_path: Path) -> None:
    short = case("small", 4, seconds=2.0, settle=0.5)
    assert cost(short, SECONDS) == 0.5 + 2.0 + AROUND
    assert cost(short, 1.0) == 0.5 + 1.0 + AROUND
    fake.run([fake.stage("trouterd", [short])], tmp_path / "a.json", 30 + cost(short, SECONDS))
    assert fake.asked == [short.key]


def test_no_budget_at_all(fake: Fake, tmp_path: Path) -> None:
    made = fake.run([fake.stage("trouterd", CASES)], tmp_path / "a.json", 0)
    assert not fake.started
    assert len(made.dropped) == len(CASES)


def test_a_failed_window_does_not_end_the_others(fake: Fake, tmp_path: Path) -> None:
    fake.broken = CASES[2].key
    made = fake.run([fake.stage("trouterd", CASES)], tmp_path / "a.json")
    assert made.failures == [(CASES[2].key, "no such route")]
    assert len(made.records) == len(CASES) - 1
    assert "trouterd/low/r2r-35/planned/1: failed: no such route" in fake.printed.getvalue()


def test_a_stage_that_does_not_start(fake: Fake, tmp_path: Path) -> None:
    @contextmanager
    def start(folder: Path, routes: Routes) -> Iterator[Fake]:
        raise RuntimeError("not ready")
        yield fake

    broken = Stage("first", 1.0, start, tuple(OTHER), daemon="first")
    made = fake.run([broken, fake.stage("trouterd", CASES)], tmp_path / "a.json")
    assert made.failures == [(OTHER[0].key, "not ready")]
    assert len(made.records) == len(CASES)


def test_as_many_streams_as_have_room(fake: Fake, tmp_path: Path) -> None:
    """What is compared has the same number of streams, although only the first system has said how many there is room for."""
    measure = fake.measure

    def limited(target: Target, one: Case) -> dict[str, Any]:
        if one.streams > 3 and one.system == "trouterd":
            raise RoomError("unix:/nowhere", one.streams, 3, 1000)
        return measure(target, one)

    fake.measure = limited  # type: ignore[method-assign]
    many = [*CASES, case("large", 8)]
    made = fake.run([fake.stage("trouterd", many), fake.stage("other", OTHER)], tmp_path / "a.json")
    keys = [record.case.key.removeprefix("trouterd/low/") for record in made.records]
    assert keys == [
        "large/-/1",
        "large/-/3",
        "r2r-35/planned/1",
        "r2r-35/planned/3",
        "r2r-35/auto/3",
        OTHER[0].key[:-1] + "3",
    ]
    assert [record.facts.get("asked_streams") for record in made.records] == [None, 4, None, 4, 4, 4]
    assert "trouterd/low/large/-/8: room for 3 only, which have been measured" in fake.printed.getvalue()
    assert not made.failures


def test_no_room_at_all(fake: Fake, tmp_path: Path) -> None:
    def limited(target: Target, one: Case) -> dict[str, Any]:
        raise RoomError("unix:/nowhere", one.streams, 0, 1000)

    fake.measure = limited  # type: ignore[method-assign]
    made = fake.run([fake.stage("trouterd", CASES[:1])], tmp_path / "a.json")
    assert made.failures == [(CASES[0].key, "the KV pools have no room for one such request")]


def test_a_window_of_fewer_streams_fails_those_that_lack_it(tmp_path: Path) -> None:
    """Experiment a has it from an earlier window, or from another daemon."""

    class Limited(Fake):
        def measure(self, target: Target, one: Case) -> dict[str, Any]:
            if one.streams > 3:
                raise RoomError("unix:/nowhere", one.streams, 3, 1000)
            if one.experiments == ("c",):
                raise CaseError("it has ended")
            return super().measure(target, one)

    limited = Limited(Clock())
    experiments = {
        "a": [limited.stage("trouterd", [case("large", 4), case("large", 8)])],
        "c": [limited.stage("trouterd", [case("large", 8)])],
    }
    first, other = limited.run_together(experiments, {letter: tmp_path / letter for letter in experiments})
    assert [record.case.streams for record in first.records] == [3]
    assert first.failures == []
    assert other.failures == [("trouterd/low/large/-/8", "it has ended")]
    assert limited.printed.getvalue().count("trouterd/low/large/-/8: failed") == 1


def test_small_pools_of_one_experiment_are_not_anothers(tmp_path: Path) -> None:
    """A window of both is measured for each with as many streams as it has room for."""

    class Limited(Fake):
        def measure(self, target: Target, one: Case) -> dict[str, Any]:
            if one.system == "divided" and one.streams > 3:
                raise RoomError("unix:/nowhere", one.streams, 3, 1000)
            return super().measure(target, one)

    limited = Limited(Clock())
    last = limited.stage("other", [case("large", 8, system="other")])
    experiments = {
        "f": [limited.stage("divided", [case("large", 8, system="divided")]), last],
        "c": [limited.stage("trouterd", [case("large", 8)]), last],
    }
    made = limited.run_together(experiments, {letter: tmp_path / letter for letter in experiments})
    assert [[record.case.key for record in result.records] for result in made] == [
        ["divided/low/large/-/3", "other/low/large/-/3"],
        ["other/low/large/-/8", "trouterd/low/large/-/8"],
    ]
    assert not any(result.failures for result in made)
    lines = limited.printed.getvalue().splitlines()
    assert [line.split()[0] for line in lines] == ["[1/3]", "[1/3]", "[2/3]", "[3/3]"], (
        "three windows, one in two parts"
    )


def test_daemons_that_turn_out_to_be_small_cap_those_together_that_share_them(tmp_path: Path) -> None:
    """An experiment that was capped before asks with the others, where they are down to the same number."""

    class Limited(Fake):
        def measure(self, target: Target, one: Case) -> dict[str, Any]:
            if one.streams > 3:
                raise RoomError("unix:/nowhere", one.streams, 3, 1000)
            return super().measure(target, one)

    limited = Limited(Clock())
    last = limited.stage("trouterd", [case("large", 8)])
    experiments = {"f": [limited.stage("divided", [case("large", 8, system="divided")]), last], "c": [last]}
    made = limited.run_together(experiments, {letter: tmp_path / letter for letter in experiments})
    assert limited.asked == ["divided/low/large/-/3", "trouterd/low/large/-/3"]
    assert made[0].records[1] == made[1].records[0]
    assert made[0].records[1].case.experiments == ("f", "c")


def test_only() -> None:
    assert matching(CASES, ()) == tuple(CASES)
    assert matching(CASES, ["*/r2r-35/*", "*/large/*/4"]) == (CASES[1], *CASES[2:])
    assert matching(CASES, ["*/auto/?"]) == (CASES[4],)
    assert not matching(CASES, ["large"])


@given(
    st.lists(
        st.tuples(st.floats(0, 50), st.lists(st.tuples(st.integers(0, 3), st.floats(0, 20)), max_size=5)), max_size=4
    ),
    st.floats(0, 300),
)
def test_what_fits(shape: list[tuple[float, list[tuple[int, float]]]], budget: float) -> None:
    stages = [
        (start, [case(f"s{s}", c + 1, importance=rank, settle=settle) for c, (rank, settle) in enumerate(cases)])
        for s, (start, cases) in enumerate(shape)
    ]
    left, dropped = within(stages, SECONDS, budget)
    kept = {one.key for cases in left for one in cases}
    everything = [one for _, cases in stages for one in cases]
    assert kept | set(dropped) == {one.key for one in everything}
    assert len(kept) + len(dropped) == len(everything)
    assert left == [[one for one in cases if one.key in kept] for _, cases in stages]
    total = sum(start for (start, _), cases in zip(stages, left, strict=True) if cases)
    total += sum(one.settle + SECONDS + AROUND for cases in left for one in cases)
    assert total <= budget + 1e-9
    ranks = {one.key: one.importance for one in everything}
    assert [ranks[key] for key in dropped] == sorted((ranks[key] for key in dropped), reverse=True)
    assert max((ranks[key] for key in kept), default=0) <= min((ranks[key] for key in dropped), default=3)


def test_names_of_files(tmp_path: Path) -> None:
    first = new_file(tmp_path / "out", "a", "x+y", "shared")
    assert first.name == "a-x+y-shared.json"
    # It is taken from then on, though nothing has been measured.
    assert new_file(tmp_path / "out", "a", "x+y", "shared").name == "a-x+y-shared-2.json"
    with pytest.raises(ResultError, match="holds no result"):
        read_results(tmp_path / "out")


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("head", "versions"), None),
        (("head", "hardware"), 3),
        (("head", "experiment"), "q"),
        (("head", "experiment"), "h"),
        (("head", "nonce"), []),
        (("head", "settings"), []),
        (("records", 0, "window"), []),
        (("records", 0, "case", "streams"), "four"),
        (("records", 0, "case", "system"), None),
    ],
)
def test_a_file_with_something_odd_in_it_is_named(tmp_path: Path, place: tuple[str | int, ...], value: object) -> None:
    saved(tmp_path, result("a", [record(case("large", 1), 50.0)]))
    (path,) = tmp_path.glob("*.json")
    read_results(tmp_path)
    content = json.loads(path.read_text())
    *way, last = place
    inner = content
    for step in way:
        inner = inner[step]
    if value is None:
        del inner[last]
    else:
        inner[last] = value
    path.write_text(json.dumps(content))
    with pytest.raises(ResultError, match=f"{path.name}: not a result of an experiment: "):
        read_results(tmp_path)


def test_a_file_that_is_nested_without_end_is_named(tmp_path: Path) -> None:
    (tmp_path / "deep.json").write_text("[" * 200_000)
    with pytest.raises(ResultError, match=r"deep.json: not a result"):
        read_results(tmp_path)


def test_a_file_that_cannot_be_written_for_a_while_misses_nothing(tmp_path: Path) -> None:
    folder, away = tmp_path / "results", tmp_path / "away"
    folder.mkdir()
    path = folder / "r.json"

    class Moving(Fake):
        def measure(self, target: Target, one: Case) -> dict[str, Any]:
            if not self.asked:
                folder.rename(away)
            elif len(self.asked) == 2:
                away.rename(folder)
            return super().measure(target, one)

    cases = [case("x", streams=streams) for streams in (1, 2, 3)]
    moving = Moving(Clock())
    moving.run([moving.stage("one", cases)], path)
    (read,) = read_results(folder)
    assert [record.case.streams for record in read.records] == [1, 2, 3]
    assert f"[0/3] cannot write {path}: No such file or directory\n[1/3] trouterd/low/x/" in moving.printed.getvalue()
    assert [file.name for file in folder.iterdir()] == ["r.json"]
    folder.rename(away)
    with pytest.raises(ResultError, match=f"cannot write {path}"):
        moving.run([], path)
