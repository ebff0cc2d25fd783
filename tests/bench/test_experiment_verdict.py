"""Is it worth it: what the report begins with."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from bench.experiment_case import ITSELF, STD, Record
from bench.experiment_draws import DRAWN, drawn_line
from bench.experiment_glossary import glossary
from bench.experiment_group import Group
from bench.experiment_rates import chance, tokens
from bench.experiment_report import write_report
from bench.experiment_result import Result, read_results
from bench.experiment_verdict import sentence, verdict
from bench.experiment_worth import worth_it
from tests.bench.experiment_fakes import R2R, case, compared, record, result, rows, saved, window
from tests.bench.test_experiment_targets import MEASURED

COUNTS = (1, 4, 16, 64)


def measured(*ratios: float, way: str = "planned", large: str = "trouterd", **fields: Any) -> Group:
    """Windows of the first pattern at these ratios to the large model, for N = 1, 4, 16, ..."""
    found = []
    for streams, ratio in zip(COUNTS, ratios, strict=False):
        asked = case(R2R, streams, way)
        found.append(record(case("large", streams, system=large), 100.0 * streams))
        found.append(Record(asked, window(asked, ratio * 100 * streams, **fields)))
    return Group([result("c", found)])


def told(group: Group) -> str:
    return sentence("R2R", verdict(group, "low")[R2R], COUNTS)


def test_a_sentence_by_rule() -> None:
    """Every token/s is off by 5 % at least: 1.04 is no difference, 1.06 pays; so many tokens leave nothing to chance."""
    text = told(measured(2.2, 1.7, 1.04, 0.8))
    assert text.startswith(
        "**R2R** pays at N = 1 to 4 (1.70 to 2.20 times the baseline), makes no difference at 16 within the error (1.04),"
        " costs speed at 64 (0.80)"
    )
    assert told(measured(1.06, 1.06, 1.06, 1.06)).startswith("**R2R** pays at N = 1 to 64 (1.06 times the baseline)")
    # A range does not reach over what was not measured.
    gap = Group([result("c", [one for one in measured(2, 2, 2).results[0].records if one.case.streams != 4])])
    assert told(gap).startswith("**R2R** pays at N = 1 and 16 (2.00 times the baseline);")


def test_tails_and_other_gpus_are_told() -> None:
    slow = {"mean": 2.0, "p50": 1.5, "p95": 3.0, "p99": 12.0}
    text = told(measured(2.0, gap_ms=slow, gpu_seconds_per_1000=7.5))
    assert text.endswith("; gap between tokens, p99: 3 times the baseline's; a token costs 0.75 times as much.")
    dear = told(measured(2.0, gpu_seconds_per_1000=15.0))
    assert dear.endswith("; but a token costs 1.50 times as much.")
    # On the same GPUs cost follows from speed.
    assert "a token costs" not in told(measured(2.0))


def test_repeats_are_the_error() -> None:
    """Lowest to highest, by the large model's highest and lowest; a mean of 1.2 that may be 0.99 does not pay."""
    repeats = [{"seed": seed, "tokens_per_second": rate} for seed, rate in enumerate((99.0, 120.0, 141.0))]
    (point,) = verdict(measured(1.2, repeats=repeats), "low")[R2R]
    assert (point.low, point.high) == pytest.approx((0.99, 1.41))
    assert point.says == "no difference"
    group = measured(1.2, repeats=[{**one, "tokens_per_second": 120.0} for one in repeats])
    group.windows[0].record.window.update(repeats=[{"seed": 0, "tokens_per_second": rate} for rate in (80.0, 125.0)])
    (point,) = verdict(group, "low")[R2R]
    assert (point.low, point.high) == pytest.approx((120 / 125, 120 / 80))
    assert "lowest of 3 windows" in worth_it([group])[0]


def test_few_tokens_are_a_wide_error() -> None:
    short, long = measured(1.2, seconds=0.2), measured(1.2, seconds=200.0)
    (narrow,), (wide,) = verdict(long, "low")[R2R], verdict(short, "low")[R2R]
    assert narrow.error == pytest.approx(0.05)
    assert (narrow.says, wide.says) == ("pays", "no difference")
    text, _ = worth_it([short])
    assert f"up to {wide.error:.0%} (`low`, R2R, p = 0.35, N = 1, a window of 24 tokens)" in text
    assert "with few tokens" not in worth_it([long])[0]


def test_chance_is_that_of_independent_draws() -> None:
    """Against the formula for one-token visits: steps of the small model that lead to a visit are geometric in number."""
    group = measured(1.0)
    (one,) = group.select(subject=R2R)
    visits, p = tokens(one) * 0.35, 0.35
    # The fake's small steps take half of the time of one request's token.
    small_step = 0.5 / 100 * 1.0
    gain = 1 - small_step / (1 / 100)
    assert chance(group, one) == pytest.approx(gain * ((1 - p) / visits) ** 0.5)
    (large,) = group.select(subject="large")
    assert chance(group, Group([result("a", [record(case("every:4", 1, "eager"), 50.0)])]).windows[0]) > 0
    assert tokens(large) == 100.0 * 20.0


def test_what_the_daemon_does_by_itself_counts() -> None:
    group = Group([result("a", compared())])
    one, four = verdict(group, "low")[R2R]
    assert [point.window.case.batching for point in (one, four)] == ["planned", "auto"]
    assert four.ratio.value == pytest.approx(1.5)


def test_the_baseline_is_named_with_its_rate() -> None:
    text, _ = worth_it([Group([result("a", compared())])])
    assert "Baseline, the large model without routing: in the routed daemon 50 and 200 token/s at N = 1 and 4." in text
    assert "By itself it was not measured" in text
    text, _ = worth_it([measured(2.0, 2.0, large=ITSELF)])
    assert "by itself 100 and 400 token/s at N = 1 and 4, the fastest of trouterd's ways" in text
    assert "not measured" not in text
    turns = result("a", compared())
    turns.head["settings"] = {"batching.overlap": False, "models.large.megakernel": "on"}
    text, _ = worth_it([Group([turns])])
    assert "in its turns it has all of its GPU and its persistent kernel, as it would by itself" in text
    assert "not measured" not in text


def test_of_runs_that_were_put_together_the_fastest_baseline_is_named() -> None:
    """A ratio is to its own run's all the same."""
    first = result("a", [record(case("large", 4), 200.0), record(case(R2R, 4, "planned"), 300.0)])
    again = [record(case("large", 4), 250.0), record(case("citer", 4, "planned"), 500.0)]
    later = result("a", again, started="2026-11-30T12:00:00Z", names={"citer": "CITER"})
    text, _ = worth_it([Group([first, later])])
    assert "in the routed daemon 250 token/s at N = 4." in text
    assert [row[4] for row in rows(text, "R2R, p = 0.35", "300")] == ["**1.50**"]


def test_several_experiments_give_one_verdict(tmp_path: Path) -> None:
    more = [record(case("large", 64), 1000.0), record(case(R2R, 64, "planned"), 900.0)]
    # A later run without a baseline of its own does not take the place of one that has it.
    part = result("b", [record(case(R2R, 4, "auto"), 500.0)], started="2026-11-30T12:00:00Z")
    text = write_report(saved(tmp_path, result("a", compared()), result("c", more), part))
    assert text.count("## Is token routing worth it here?") == text.count("Above 1 pays") == 1
    assert "**R2R, p = 0.35** pays at N = 1 to 4 (1.50 to 2.50 times the baseline), costs speed at 64 (0.90)" in text
    assert rows(text, "R2R, p = 0.35", "900")[0][4] == "0.90"
    order = [
        text.index(f"## {title}") for title in ("Is token", "Terms", "Algorithms", "From one", "The project's own")
    ]
    assert order == sorted(order)


def test_nothing_is_said_where_nothing_is_compared(tmp_path: Path) -> None:
    """No line on draws and no verdict over windows that were never drawn, or over none at all."""
    every = [record(case("large", 1), 50.0), record(case("every:2", 1, "eager"), 80.0)]
    for number, found in enumerate((result("d", every), result("a", []))):
        text = write_report(saved(tmp_path / str(number), found))
        assert text.startswith("# Throughput of token routing")
        assert "drawn at" not in text
        assert "worth it" not in text
    assert drawn_line([Result({"experiment": "h", "names": {}})]) == ""


def test_what_is_said_of_heads_is_true() -> None:
    """One line, which depends on what there is."""
    real, scripted = result("a", compared()), result("a", compared(), heads=False)
    assert drawn_line([real]).startswith(DRAWN)
    assert "heads run" in drawn_line([real])
    assert "with Std. Serving none" in drawn_line([real])
    alone = result("a", [one for one in compared() if one.case.system != STD])
    assert "Std. Serving" not in drawn_line([alone])
    assert "heads run" not in drawn_line([scripted])
    assert "no hidden states" in drawn_line([scripted])
    assert {"heads run", "no hidden states"} <= set(
        re.findall("heads run|no hidden states", drawn_line([real, scripted]))
    )


def test_cost_without_a_gpu_is_not_told_in_gpus(tmp_path: Path) -> None:
    text = write_report(saved(tmp_path, result("a", compared(), placement="cpu", pair="6+28", hardware="2 cores")))
    assert "device-s / 1,000" in text
    assert "GPU-s" not in text


def test_terms_are_those_that_occur() -> None:
    text = glossary("| asked | B | planned B | of ideal |\n\neager, predicted")
    assert [line.split("*")[1] for line in text.splitlines() if line.startswith("- ")] == [
        *("B", "planned B", "asked", "of ideal"),
    ]
    assert glossary("nothing") == ""


def test_the_measured_file(tmp_path: Path) -> None:
    """Its verdict has the figures of its tables."""
    shutil.copy(MEASURED, tmp_path)
    (found,) = read_results(tmp_path)
    text, results = worth_it([Group([found])])
    assert results == [found]
    assert "**R2R, p = 0.35** pays at N = 1 to 64 (1.19 to 1.82 times the baseline)" in text
    assert (
        "**Co-LLM, p = 0.54** pays at N = 1 to 16 (1.10 to 1.28 times the baseline), makes no difference at 64" in text
    )
    assert rows(text, "large only", "879")[0][-1] == "6,155"
    assert rows(text, "R2R, p = 0.35", "414")[0][4:7] == ["**1.64**", "1.56", "1.72"]
