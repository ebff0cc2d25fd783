"""What the tables of a report say of windows."""

from __future__ import annotations

import pytest

from bench.experiment_case import ITSELF, Record
from bench.experiment_compared import compared as compared_table
from bench.experiment_details import details, latencies
from bench.experiment_group import Group
from bench.experiment_markdown import cell, table
from bench.experiment_tables import ablated, lengthened, mistaken, scaled_up
from bench.experiment_targets import targets_table
from bench.experiment_time import spent, visit_price
from tests.bench.experiment_fakes import R2R, case, compared, part, record, result, rows, window


def test_times_that_there_are_enough_of() -> None:
    """A percentile of a few requests is none, and first tokens of all requests at once are marked."""
    asked = case(R2R, 16, "planned")
    times = {"mean": 2.0, "p50": 1.5, "p95": 3.0, "p99": 4.0}
    repeats = [{"seed": seed, "tokens_per_second": rate} for seed, rate in enumerate((380.0, 420.0))]
    few = {"requests": 30, "request_ms": times, "seed": 1, "repeats": repeats, "admission_ms": times | {"count": 10}}
    few |= {"wait_ms": {"small": times, "large": times}, "extra": {"request_estimate_ms": 9000.0}}
    group = Group([result("a", [Record(asked, window(asked, 400.0, **few))])])
    (row,) = rows(latencies(group), "R2R, p = 0.35")
    assert row[5:] == [
        "2",
        "1.5",
        "3",
        "-",
        "2",
        "1.5",
        "3",
        "4",
        "2",
        "1.5",
        "3",
        "-",
        "2",
        "1.5",
        "3",
        "4",
        "9,000",
        "2, 2",
    ]
    assert rows(details(group), "R2R, p = 0.35")[0][5] == "400 (380 to 420)"
    with_large = Group([result("a", [Record(asked, window(asked, 400.0, **few)), record(case("large", 16), 200.0)])])
    assert rows(targets_table([with_large]), "R2R, p = 0.35 / large only")[2][4] == "2 (1.9 to 2.1)"
    at_once = window(asked, 400.0, extra={"ttft_of": "start"}, requests=0, request_ms=times)
    (row,) = rows(latencies(Group([result("a", [Record(asked, at_once)])])), "R2R, p = 0.35")
    assert row[5:9] == ["2\\*", "1.5\\*", "-", "-"], "of sixteen"
    # Of an answer that a window has seen whole nothing is known without a seed: they had been cut short.
    assert row[13:] == ["-"] * 10


def test_costs_are_those_of_all_gpus() -> None:
    """Two GPUs at twice the tokens cost what one does, and half of the large model's steps."""
    asked, alone = case(R2R, 4, "planned"), case("large", 4, system=ITSELF)
    routed = window(asked, 400.0, gpu_seconds_per_1000=2 * 1e3 / 400, large_forwards_per_1000=125.0)
    large = window(alone, 200.0, large_forwards_per_1000=250.0)
    group = Group([result("a", [Record(alone, large), Record(asked, routed)])])
    assert rows(part(compared_table(group), "GPU-seconds / forward passes"), "planned B")[0][2] == "1.00 / 0.50"


def test_wrong_thresholds_that_come_to_the_same() -> None:
    half = case(R2R, 16, "planned x 0.5")
    copied = Record(half, window(half, 400.0), {"same_as": "planned", "thresholds": {"small": 1, "large": 8}})
    text = mistaken(Group([result("e", [record(case(R2R, 16, "planned"), 400.0), copied])]))
    assert rows(text, "x 0.5")[0][4:6] == ["same as planned", "-"]


def test_ratios_across_runs_are_marked() -> None:
    """Of every experiment, and of every target."""
    one_stream = [record(case("large", 1), 50.0), record(case(R2R, 1, "planned"), 100.0)]
    many = [record(case("large", 16), 700.0), record(case(R2R, 16, "planned"), 1200.0)]
    many.append(record(case(R2R, 16, "auto"), 1400.0))
    one, other = result("c", one_stream), result("c", many, started="2026-11-30T11:00:00Z")
    group = Group([one, other])
    sixteen = rows(scaled_up(group), "16")[0]
    assert sixteen[3:9] == ["1,400", "learned B", "2.00", "2.00", "0.50", "1,400"]
    assert sixteen[9:] == ["2.00", "-", "14.00\\*", "88%\\*", "88%\\*"]
    grown, kept = rows(targets_table([group]), "N = 1 to 16")
    assert (grown[4], grown[5], grown[8], kept[4]) == ("14\\*", "learned B", "14\\*", "88%\\*")
    assert grown[10] == "14\\*"
    whole = result("b", [record(case(R2R, 4, "planned"), 400.0)])
    part = result("b", [record(case(R2R, 4, "planned", system="no graphs"), 300.0)], started="2026-11-30T11:00:00Z")
    assert rows(ablated(Group([whole, part])), "no graphs")[0][2] == "300 (0.75\\*)"
    right = result("e", [record(case(R2R, 4, "planned"), 400.0)])
    wrong = result("e", [record(case(R2R, 4, "planned x 2"), 300.0)], started="2026-11-30T11:00:00Z")
    assert rows(mistaken(Group([right, wrong])), "x 2")[0][5] == "0.75\\*"
    short = result("g", [record(case(R2R, 4, "planned"), 400.0)])
    long = result("g", [record(case(R2R, 4, "planned", workload="3072/32768"), 380.0)], started="2026-11-30T11:00:00Z")
    text = lengthened(Group([short, long]))
    assert rows(text, "R2R")[0][-1] == "95%\\*"


def test_where_the_time_goes() -> None:
    """The fake window has one request in a step of either model for half of the time."""
    group = Group([result("a", compared())])
    (one,) = group.select(subject=R2R, streams=4, batching="planned")
    found = spent(group, one)
    assert found is not None
    assert found.total == pytest.approx(4e3 / 400)
    assert found.small == found.large == pytest.approx(0.5 * 1e3 / 400)
    # Steps are as long as alone, so that nothing but waiting is lost.
    assert found.small_alone == pytest.approx(found.small)
    assert found.waiting == pytest.approx(3e3 / 400)
    assert found.cause.startswith("waiting for a launch and hand-offs: 7.5 of 10 ms")
    # A visit every 100 / 35 tokens, of which 7.5 of 10 ms are in no step.
    assert visit_price(group, one) == pytest.approx(7.5 * 100 / 35)


def test_the_price_of_a_visit_has_what_steps_take_longer() -> None:
    """Every fourth token by the large model: steps of 1 and 15 ms alone, of 1.5 and 20 ms here, and 2 ms between them."""
    asked, cycle = case("every:4", 1, "eager"), 4 * 1.5 + 20 + 2
    routed = window(
        asked,
        4e3 / cycle,
        handoffs_per_100=50.0,
        batch={"small": 1.0, "large": 1.0},
        step_ms={"small": 1.5, "large": 20.0},
        busy={"small": 4 * 1.5 / cycle, "large": 20 / cycle},
    )
    group = Group(
        [result("d", [record(case("large", 1), 50.0), record(case("small", 1), 900.0), Record(asked, routed)])]
    )
    (one,) = group.select(subject="every:4")
    assert visit_price(group, one) == pytest.approx(cycle - 4 * 1 - 15)


def test_cells() -> None:
    assert [cell(value) for value in (None, 1234.5, 12.345, 0.001234, 7, "x")] == [
        "-",
        "1,234",
        "12.3",
        "0.00123",
        "7",
        "x",
    ]
    assert table(["a", "b"], []) == ""
    assert table(["a", "b"], [(1, 2.0)]) == "| a | b |\n|---|---:|\n| 1 | 2 |\n"
