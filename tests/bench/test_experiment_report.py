"""One report out of the results of several runs."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from bench import experiment_peer, experiments
from bench.experiment_case import ITSELF, STD, Case, CaseError, Record, cost
from bench.experiment_compared import compared as compared_table
from bench.experiment_details import details, latencies
from bench.experiment_group import Group
from bench.experiment_itself import NO_KERNEL, ways
from bench.experiment_markdown import cell, table
from bench.experiment_peer import peer
from bench.experiment_report import TITLES, side_by_side, write_report
from bench.experiment_result import Result, read_results
from bench.experiment_scope import Scope
from bench.experiment_servers import _pools
from bench.experiment_settings import Settings
from bench.experiment_setup import Setup
from bench.experiment_tables import ablated, lengthened, mistaken, scaled_up
from bench.experiment_targets import TARGETS, targets_table
from bench.experiment_time import spent, visit_price
from bench.patterns import DRAWN, PATTERNS
from bench.vllm_peer import PeerCase
from tests.bench.experiment_fakes import case, record, result, window

R2R = "r2r-35"
MEASURED = Path(experiments.__file__).parent / "results" / "1x-h200" / "a-Qwen3-0.6B+Qwen3-32B-shared.json"


def compared(large: float = 50.0, factor: float = 1.0) -> list[Record]:
    """Experiment a at one and at four streams."""
    rates = {1: (large, 2.5, 1.0), 4: (4 * large, 2.0, 0.5)}
    found = []
    for streams, (alone, routed, std) in rates.items():
        found += [
            record(case("large", streams), alone),
            record(case("small", streams), 20 * alone),
            record(
                case(R2R, streams, "planned"),
                factor * routed * alone,
                predicted=600.0,
                thresholds={"small": 1, "large": streams},
            ),
            record(case(R2R, streams, system=STD), std * alone),
        ]
    return [*found, record(case(R2R, 4, "auto"), 1.5 * 4 * large)]


def rows(text: str, *words: str) -> list[list[str]]:
    """Cells of the table rows with all these words."""
    found = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [row for row in found if all(any(word in one for one in row) for word in words)]


def part(text: str, title: str) -> str:
    """The first table below a line with these words."""
    _, after = text.split(title, 1)
    return after.split("\n\n", 2)[1]


def saved(folder: Path, *results: Result) -> Path:
    for number, one in enumerate(results):
        one.save(folder / f"{number}.json")
    return folder


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
    assert lines[0] == DRAWN
    assert text == (tmp_path / "report.md").read_text()
    (ratios,) = rows(part(text, "token/s x the fastest large only"), "planned B")
    assert ratios[2:] == ["2.50", "2.20\\*", "1.50"]
    (learned,) = rows(part(text, "token/s x the fastest large only"), "learned B")
    assert learned[2:] == ["2.50", "1.50", "-"]
    (std,) = rows(part(text, "token/s x Std. Serving"), "planned B")
    assert std[2:] == ["2.50", "4.40\\*", "-"]
    detail, _ = rows(text, "planned B (1, 1)")
    assert detail[4:12] == ["1", "125", "2.50", "2.50", "p 0.35 for 0.35", "2.50", "100%", "600"]
    assert "Left out for lack of time (1): `trouterd/low/r2r-35/auto/64`" in text
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
    before, _ = text.split("# Throughput", 1)
    assert "**Experiment a, 2026-01-02T03:04:05Z**: no head ran" in before
    assert before.count("**Experiment") == 1


def test_targets_say_met_and_missed() -> None:
    group = Group([result("a", compared())])
    text = targets_table([group])
    one, four, *_ = rows(text, "R2R, p = 0.35 / large only")
    drawn = ["planned B", "in the routed daemon", "p 0.35 for 0.35"]
    assert one[1:] == ["1", "2.3", "2.6", "2.5", *drawn, "2.5", "first met", "2.5", one[-1]]
    assert four[1:] == ["4", "1.9", "2.4", "2", *drawn, "2", "first met", "1.5", four[-1]]
    assert rows(text, "CITER")[0][4:10] == ["-", "-", "-", "-", "-", "not measured"]
    assert [row[9] for row in rows(text, "of the ideal bound")] == [
        "aim met",
        "**missed**",
        "not measured",
        "not measured",
    ]
    better = targets_table([Group([result("a", compared(factor=1.2))])])
    assert [row[9] for row in rows(better, "R2R, p = 0.35 / large only")[:2]] == ["aim met", "aim met"]
    worse = targets_table([Group([result("a", compared(factor=0.7))])])
    (missed, *_) = rows(worse, "R2R, p = 0.35 / large only")
    assert missed[9] == "**missed**"
    # A cause, from where the time of the window goes.
    assert "ms per token" in missed[11]
    assert len(rows(text, "")) - 1 == sum(len(target.streams) for target in TARGETS)


def test_large_only_is_the_fastest_way_to_serve_it(tmp_path: Path) -> None:
    """By itself it is faster at one stream, in the routed daemon at four; one way has another run's window only."""
    first = result("a", [*compared(), record(case("large", 1, system=ITSELF), 62.5)])
    first.records.append(record(case("large", 4, system=ITSELF), 190.0))
    other = result("a", [record(case("large", 4, system=NO_KERNEL), 250.0)], started="2026-11-30T09:00:00Z")
    text = write_report(saved(tmp_path, first))
    alone = part(text, "the large model without routing, token/s")
    assert rows(alone, "in the routed daemon")[0][1:] == ["50", "200"]
    assert rows(alone, "by itself")[0][1:] == ["62.5", "190"]
    assert rows(alone, "the fastest")[0][1:] == ["by itself", "in the routed daemon"]
    assert rows(part(text, "token/s x the fastest large only"), "planned B")[0][2:] == ["2.00", "2.00"]
    assert rows(part(text, "token/s x the large model of the routed daemon"), "planned B")[0][2:] == ["2.50", "2.00"]
    assert rows(targets_table([Group([first])]), "R2R, p = 0.35 / large only")[0][4:7] == [
        "2",
        "planned B",
        "by itself",
    ]
    with_other = Group([other, first])
    (four,) = with_other.select(subject=R2R, streams=4, batching="planned")
    assert str(with_other.to_large(four)) == "1.60\\*"
    assert "was not measured by itself" not in text
    assert "was not measured by itself" in compared_table(Group([result("a", compared())]))


def test_ways_to_serve_the_large_model_alone() -> None:
    def names(*devices: str, pair: tuple[str, str] = ("Qwen3-0.6B", "Qwen3-32B"), world: int = 1) -> dict[str, Any]:
        return dict(ways(Setup(pair, devices, (1, world))))

    assert list(names("cuda:0", "cuda:0")) == [ITSELF, NO_KERNEL]
    apart = names("cuda:0", "cuda:1")
    assert list(apart) == [ITSELF, NO_KERNEL, "by itself TP2"]
    assert (apart["by itself TP2"].device, apart["by itself TP2"].tensor_parallel) == ("cuda:0", 2)
    assert (apart[ITSELF].device, apart[ITSELF].settings) == ("cuda:1", ())
    assert apart[NO_KERNEL].settings == ('megakernel = "off"',)
    assert list(names("cuda:0", "cuda:0", world=2)) == [ITSELF]
    assert list(names("cuda:0", "cuda:2")) == [ITSELF, NO_KERNEL], "not in a row"
    assert list(names("cpu", "cpu", pair=("script:6", "script:28"))) == [ITSELF]


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


def test_a_file_of_before_can_be_read(tmp_path: Path) -> None:
    """Whatever windows have got since it was measured."""
    shutil.copy(MEASURED, tmp_path)
    group = Group(read_results(tmp_path))
    text = targets_table([group])
    assert rows(text, "R2R, p = 0.35 / large only")[0][4:9] == [
        *("2.35", "planned B", "in the routed daemon", "p 0.328 for 0.35", "2.23"),
    ]
    assert len(rows(latencies(group), "low")) == len(group.windows) == len(rows(details(group), "low"))


def test_targets_are_for_one_pair_on_one_card() -> None:
    for other in ({"pair": "x+y"}, {"placement": "separate"}, {"hardware": "2 cores of x86_64"}):
        assert targets_table([Group([result("a", compared(), **other)])]) == ""


def test_the_peer_has_a_row_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, Any] = {}

    def run(folder: Path, **options: Any) -> list[PeerCase]:
        asked.update(options, folder=folder)
        return [
            PeerCase("vllm std serving", 4, 0.35, 100.0, 20.0, 90.0),
            PeerCase("vllm std serving", 4, 0.1, 200.0, 20.0, 60.0),
            PeerCase("vllm large alone", 4, None, 210.0, None, None),
        ]

    monkeypatch.setattr(experiment_peer, "run_std_serving", run)
    setup = Setup(("Qwen3-0.6B", "Qwen3-32B"), ("cuda:0", "cuda:0"), (1, 1))
    scope = Scope(setup, ("low",), (4, 16), PATTERNS, 4.0, 20.0)
    stage = peer(scope, tmp_path, (4, 16), 14)
    assert all(cost(one, 20.0) == 0 for one in stage.cases)
    subjects = dict.fromkeys(one.subject for one in stage.cases)
    assert list(subjects) == [
        "r2r-35",
        "r2r-10",
        "large",
    ]  # the important ones
    assert {one.workload for one in stage.cases} == {"100/64"}
    # Ours of the same lengths, and no other, is what its row has.
    records = [*compared(), record(case(R2R, 4, "planned", workload="100/64"), 300.0)]
    with stage.open(tmp_path) as opened:
        for one in stage.cases:
            if one.streams == 4 and one.subject in ("r2r-35", "r2r-10", "large"):
                records.append(opened.record(one, measure=lambda *_: {}))
        with pytest.raises(CaseError, match="did not come to it"):
            opened.record(stage.cases[1], measure=lambda *_: {})
    assert asked["shares"] == [0.35, 0.1]
    assert stage.seconds == asked["limit"], "it takes no longer than what is planned for it"
    assert (asked["small"], asked["large"], asked["streams"]) == ("Qwen3-0.6B", "Qwen3-32B", (4, 16))
    text = write_report(saved(tmp_path, result("a", records)))
    four, *_ = rows(text, "Std. Serving on vLLM")
    assert (four[1:5], four[9]) == (["4", "3.7", "4.7", "3"], "**missed**")
    assert rows(text, "std serving on vLLM", "large only")[0][5] == "210"


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
        "## Targets, one H200",
        *(
            f"## {TITLES[name]}: {'demo, on the CPU' if name == 'h' else 'Qwen3-0.6B+Qwen3-32B, on one card'}"
            for name in "bcdefgh"
        ),
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
    assert experiments.main(["--report", str(tmp_path)]) == 1
    assert f"{tmp_path}: holds no result" in capsys.readouterr().err
    saved(tmp_path, *others())
    assert experiments.main(["--report", str(tmp_path)]) == 0
    assert "## Ablation" in capsys.readouterr().out
    (tmp_path / "bad.json").write_text('{"head": {"experiment": "a"}, "records": [{"case": {}}]}')
    assert experiments.main(["--report", str(tmp_path)]) == 1
    assert "bad.json: not a result of an experiment" in capsys.readouterr().err


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
