"""Targets of a report, and what large only is."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from bench import experiment_peer, experiments
from bench.experiment_case import ITSELF, CaseError, cost
from bench.experiment_compared import compared as compared_table
from bench.experiment_details import details, latencies
from bench.experiment_group import Group
from bench.experiment_itself import NO_KERNEL, ways
from bench.experiment_peer import peer
from bench.experiment_report import write_report
from bench.experiment_result import read_results
from bench.experiment_scope import Scope
from bench.experiment_setup import Setup
from bench.experiment_targets import TARGETS, targets_table
from bench.patterns import PATTERNS
from bench.vllm_peer import PeerCase
from tests.bench.experiment_fakes import R2R, case, compared, part, record, result, rows, saved

MEASURED = Path(experiments.__file__).parent / "results" / "1x-h200" / "a-Qwen3-0.6B+Qwen3-32B-shared.json"


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


def test_scaling_is_that_of_the_experiment_on_it() -> None:
    def group(letter: str, few: float, many: float) -> Group:
        return Group([result(letter, [record(case(R2R, 1, "planned"), few), record(case(R2R, 16, "planned"), many)])])

    for groups in ([group("a", 100.0, 1300.0), group("c", 100.0, 1000.0)], [group("c", 100.0, 1000.0)]):
        (row,) = rows(targets_table(groups), "token/s x N = 1")
        assert (row[4], row[9]) == ("10", "**missed**")
    (row,) = rows(targets_table([group("a", 100.0, 1300.0)]), "token/s x N = 1")
    assert (row[4], row[9]) == ("13", "aim met")


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


def test_a_workload_of_which_only_the_large_model_was_measured_has_no_table_and_no_plot(tmp_path: Path) -> None:
    alone = record(case("large", 1, system=ITSELF, workload="agent"), 60.0)
    text = write_report(saved(tmp_path, result("a", [*compared(), alone])))
    assert "Workload `low`: the large model without routing" in text
    assert "Workload `agent`: the large model without routing" not in text
    assert rows(text, "by itself", "agent"), "all windows are told"
    assert [path.stem for path in tmp_path.glob("*.png")] == ["a-Qwen3-0.6B+Qwen3-32B-shared"]


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


def test_a_file_of_before_can_be_read(tmp_path: Path) -> None:
    """Whatever windows have got since it was measured."""
    shutil.copy(MEASURED, tmp_path)
    group = Group(read_results(tmp_path))
    text = targets_table([group])
    assert rows(text, "R2R, p = 0.35 / large only")[0][4:9] == [
        *("1.85", "planned B; context_length = 4096 (small, large)", "by itself", "p 0.344 for 0.35", "1.82"),
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
    with stage.opened(tmp_path) as opened:
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
