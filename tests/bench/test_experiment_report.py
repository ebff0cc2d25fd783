"""One report out of the results of several runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from bench import experiments
from bench.experiment_case import Case, Record
from bench.experiment_draws import DRAWN
from bench.experiment_group import Group
from bench.experiment_report import TITLES, side_by_side, write_report
from bench.experiment_result import Result
from bench.experiment_servers import _pools
from bench.experiment_settings import Settings
from bench.experiment_setup import Setup
from tests.bench.experiment_fakes import R2R, case, compared, part, record, result, rows, saved, window


def test_two_runs_in_one_report(tmp_path: Path) -> None:
    """The second has one window anew, and one that the first lacks, without a reference of its own."""
    first = result("a", compared())
    second = result(
        "a",
        [record(case(R2R, 4, "planned"), 440.0), record(case(R2R, 16, "planned"), 900.0)],
        started="2026-11-30T11:00:00Z",
    )
    second.records.append(record(case("large", 16), 600.0))
    second.dropped, second.failures = ["trouterd/low/r2r-35/auto/64"], [("trouterd/low/r2r-35/auto/16", "no answer")]
    text = write_report(saved(tmp_path, first, second))
    lines = text.splitlines()
    assert lines[0].startswith(DRAWN)
    assert text == (tmp_path / "report.md").read_text()
    (ratios,) = rows(part(text, "token/s x the fastest large only"), "planned B")
    assert ratios[2:] == ["2.50", "2.20\\*", "1.50"]
    (learned,) = rows(part(text, "token/s x the fastest large only"), "learned B")
    assert learned[2:] == ["2.50", "1.50", "-"]
    (std,) = rows(part(text, "token/s x Std. Serving"), "planned B")
    assert std[2:] == ["2.50", "4.40\\*", "-"]
    detail, _ = rows(text, "planned B (1, 1)")
    assert detail[4:12] == ["1", "125", "2.50", "2.50", "p 0.35 for 0.35", "2.50", "100%", "600"]
    assert "No time was left for everything. 1 dropped: trouterd/low/r2r-35/auto/64." in text
    assert "- `trouterd/low/r2r-35/auto/16`: no answer" in text
    assert text.count("commit abc1234") == 2
    with Image.open(tmp_path / "a-Qwen3-0.6B+Qwen3-32B-shared.png") as image:
        image.verify()
    # Files of other benches may lie beside.
    (tmp_path / "step.json").write_text(json.dumps({"decode": []}))
    assert write_report(tmp_path) == text


def test_std_serving_without_servers_of_its_own_is_told(tmp_path: Path) -> None:
    assert "no servers of its own" not in write_report(saved(tmp_path, result("a", compared())))
    assert "no servers of its own" in write_report(saved(tmp_path, result("a", compared(), std_servers=False)))


def test_pools_of_servers_that_share_a_gpu() -> None:
    """They get those of the one daemon, a little less, unless they are given."""
    both = Setup(("Qwen3-0.6B", "Qwen3-32B"), ("cuda:0", "cuda:0"), (1, 1))
    pools = {"small": 100_000, "large": 100_000}
    assert _pools(both, pools) == dict.fromkeys(pools, ("kv_tokens = 95000",))
    assert _pools(replace(both, devices=("cuda:0", "cuda:1")), pools) == {}
    given = replace(both, settings=Settings.read(["large.kv_tokens=7000"], both.names))
    assert _pools(given, pools) == {"small": ("kv_tokens = 95000",)}
    assert _pools(both, {}) == {}


def test_a_run_that_is_particular_says_so_first(tmp_path: Path) -> None:
    usual, odd = result("a", compared()), result("a", compared(), "2026-01-02T03:04:05Z", note="no head ran")
    text = write_report(saved(tmp_path, usual, odd))
    before, _ = text.split("Workload `low`", 1)
    assert "**Experiment a, 2026-01-02T03:04:05Z**: no head ran" in before
    assert text.count("**Experiment") == 1
    # Where nothing is compared, the note stands with its experiment.
    alone = result("b", [record(case(R2R, 4, "planned"), 400.0)], note="no head ran")
    text = write_report(saved(tmp_path / "b", alone))
    assert text.index("## Ablation") < text.index("**Experiment b")


def test_cards_of_their_own_beside_a_shared_one() -> None:
    def places(placement: str) -> Result:
        return result(
            "f", [record(case("large", 4), 200.0), record(case(R2R, 4, "planned"), 400.0)], placement=placement
        )

    shared, separate = side_by_side([places("shared"), places("separate")])
    group = Group([shared, separate])
    assert {one.case.system for one in group.windows} == {"trouterd", "a card each"}
    (one,) = group.select(system="a card each", subject=R2R)
    assert str(group.to_large(one)) == "2.00\\*"
    alone = places("separate")
    assert side_by_side([alone, result("a", [])]) == [alone, result("a", [])]


def steps(one: Case, rate: float, small: tuple[float, float, float], large: tuple[float, float, float]) -> Record:
    """A window that tells of its steps: requests, milliseconds, and those of them for which the other model ran."""
    own = {
        name: {"steps": 99, "batch": batch, "step_ms": step, "overlap_ms": overlap}
        for name, (batch, step, overlap) in {"small": small, "large": large}.items()
        if one.subject in (name, R2R)
    }
    return Record(one, window(one, rate, overlap=own), {})


def test_ways_to_share_a_card(tmp_path: Path) -> None:
    divided, alone = {"system": "kernel at 12 %", "changed": ("small",)}, ((16, 1.0, 0.0), (16, 18.0, 0.0))
    found = [
        steps(case("large", 16), 860.0, *alone),
        steps(case("small", 16), 8000.0, *alone),
        steps(case("small", 16, **divided), 3000.0, (16, 2.0, 0.0), alone[1]),
        steps(case(R2R, 16, "eager"), 980.0, (5, 1.25, 1.0), (8, 36.0, 22.5)),
        steps(case(R2R, 16, "planned", system="turns"), 1500.0, (5, 1.0, 0.0), (14, 18.0, 0.0)),
        steps(case(R2R, 16, "eager", **divided), 1300.0, (6, 2.5, 2.5), (8, 20.0, 20.0)),
    ]
    text = write_report(saved(tmp_path, result("f", found)))
    table, contention = text.split("What a step of R2R, p = 0.35 takes longer", 1)
    (eager,) = rows(table, "as it is", "eager", "980")[:1]
    assert eager[3:12] == ["16", "980", "1.14", "1", "1.25", "18", "36", "80%", "62%"]
    (twelve,) = rows(table, "kernel at 12 %", "1,300")[:1]
    assert twelve[5:12] == ["1.51", "2", "2.5", "18", "20", "100%", "100%"]
    assert not rows(table, "as it is", "small only")
    assert "add to a step for each request: 0 ms (small), 0 ms (large)." in contention
    assert rows(contention, "as it is", "0.8")[0] == ["as it is", "0.25", "0.8", "0.33,4", "1"]
    assert rows(contention, "kernel at 12 %", "0.1")[0] == ["kernel at 12 %", "0.2", "0.1", "0.25,0.11", "1"]


def test_results_with_other_settings_stay_apart(tmp_path: Path) -> None:
    usual, divided = result("a", compared()), result("a", compared(factor=1.2), "2026-11-30T11:00:00Z")
    divided.head["settings"] = {"models.small.megakernel_percent": 30}
    text = write_report(saved(tmp_path, usual, divided))
    titles = [line for line in text.splitlines() if line.startswith(f"## {TITLES['a']}")]
    assert [title.partition("on one card")[2] for title in titles] == ["", "; small.megakernel_percent = 30"]
    assert (tmp_path / "a-Qwen3-0.6B+Qwen3-32B-shared-small.megakernel_percent-30.png").is_file()
    # Of what was measured with several settings the better counts, and they are told.
    one, *_ = rows(text, "R2R, p = 0.35 / large only")
    assert (one[4], one[5], one[9]) == ("3", "planned B; small.megakernel_percent = 30", "aim met")


def others() -> list[Result]:
    ablation = [
        record(case(R2R, 4, "planned", system=name), rate) for name, rate in (("trouterd", 400), ("no graphs", 300))
    ]
    scaling = [
        record(case(subject, n, way), rate)
        for subject, way, rates in (("large", "", {1: 50, 16: 700}), (R2R, "planned", {1: 120, 16: 1440}))
        for n, rate in rates.items()
    ]
    every = [record(case(f"every:{n}", 1, "eager"), 50.0 * n) for n in (1, 2, 4)]
    wrong = [
        record(case(R2R, 16, way), rate, thresholds={"small": 1, "large": 8})
        for way, rate in (("planned", 400), ("planned x 0.5", 300), ("planned x 2", 350), ("eager", 200))
    ]
    places = [record(case(R2R, 16, "planned", system=name), 400) for name in ("trouterd", "large at 80 %", "no MPS")]
    long = [record(case(R2R, 4, "planned", workload=name), rate) for name, rate in (("low", 400), ("3072/32768", 380))]
    large = record(case("large", 1), 50.0)
    return [
        result("b", ablation),
        result("c", scaling),
        result("d", [large, *every]),
        result("e", wrong),
        result("f", places),
        result("g", long),
    ]


@pytest.mark.slow
def test_every_experiment_has_its_table_and_plot(tmp_path: Path) -> None:
    points = [
        {
            "sweep": name,
            "setting": "t = 1",
            "accuracy": 0.9,
            "large_share": share,
            "tokens_per_second": 100.0,
            "handoffs_per_100": 3.0,
            "large_forwards": 5.0,
        }
        for name, share in (("entropy", 0.1), ("large only", 1.0))
    ]
    quality = Result(result("h", [], pair="demo", placement="cpu", hardware="2 cores").head, points=points)
    text = write_report(saved(tmp_path, *others(), quality))
    assert [line for line in text.splitlines() if line.startswith("## ")] == [
        "## Is token routing worth it here?",
        "## Terms",
        *(
            f"## {TITLES[name]}: {'demo, on the CPU' if name == 'h' else 'Qwen3-0.6B+Qwen3-32B, on one card'}"
            for name in "bcdefgh"
        ),
        "## The project's own targets, one H200",
    ]
    assert rows(text, "no graphs", "planned B")[0][2] == "300 (0.75)"
    (sixteen,) = (row for row in rows(text, "1,440") if row[0] == "16")
    assert sixteen[0:4] == ["16", "700", "in the routed daemon", "1,440"]
    assert sixteen[11:] == ["12.00", "75%", "88%"]
    assert [row[4] for row in rows(text, "eager", "70")][:3] == ["1.00", "2.00", "4.00"]
    assert rows(text, "R2R, p = 0.35", "x 0.5")[0][5] == "0.75"
    assert rows(text, "no MPS")[0][:4] == ["no MPS", "R2R, p = 0.35", "planned B", "16"]
    assert rows(text, "trouterd, R2R, p = 0.35, planned B")[0][2:] == ["400", "380", "95%"]
    assert rows(text, "entropy", "90.0%")
    assert len(list(tmp_path.glob("*.png"))) == 7


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert experiments.main(["--report", str(tmp_path)]) == 2
    assert f"{tmp_path}: holds no result" in capsys.readouterr().err
    saved(tmp_path, *others())
    assert experiments.main(["--report", str(tmp_path)]) == 0
    assert "## Ablation" in capsys.readouterr().out
    (tmp_path / "bad.json").write_text('{"head": {"experiment": "a"}, "records": [{"case": {}}]}')
    assert experiments.main(["--report", str(tmp_path)]) == 2
    assert "bad.json: not a result of an experiment" in capsys.readouterr().err


@pytest.mark.parametrize("experiment", "abcdefg")
def test_models_alone_are_a_report_too(experiment: str, tmp_path: Path) -> None:
    """What a small budget leaves of an experiment beside others."""
    text = write_report(saved(tmp_path, result(experiment, [record(case("large", 4), 100.0)])))
    assert rows(text, "trouterd", "large only", "low")
