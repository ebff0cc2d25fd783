"""The bench of the throughput model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench import batching, delayed, delayed_report
from bench.neighbours import Neighbours, ticks
from trouterd import settings


@pytest.mark.slow
def test_report(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "_REPEATS", 1)
    monkeypatch.setattr(batching, "_LISTED", 16)
    path = tmp_path / "report.md"
    assert batching.main(["--requests", "1,4", "--steps", "3000", "--markdown", str(path)]) == 0
    report = path.read_text()
    assert report == capsys.readouterr().out
    rows = [line.strip("| ").split(" | ") for line in report.splitlines() if " GPU" in line and line.count("|") > 5]
    assert len(rows) == len(batching.MOVES) * len(batching.PLACES) * 2
    for row in rows:
        predicted, simulated, eager = (float(cell.replace(",", "")) for cell in row[4:7])
        assert predicted == pytest.approx(simulated, rel=0.08)
        assert simulated > 0.95 * eager
    assert "Model against simulator" in report


def test_report_of_the_daemon(tmp_path: Path) -> None:
    def window(how: str, thresholds: tuple[int, int], measured: float) -> delayed.Run:
        return delayed.Run(
            requests=4,
            pattern="geometric",
            how=how,
            thresholds=thresholds,
            measured=measured,
            predicted=110.0,
            step_ms=(6.0, 28.0),
            share=0.35,
            handoff_ms=0.25,
            others=0.05,
            batches=(2.0, 3.0),
            over_eager=measured / 100.0,
        )

    runs = [window("eager", (1, 1), 100.0), window("B*", (1, 3), 120.0), window("eager", (1, 1), 100.0)]
    runs += [window("B*", (1, 3), 124.0), window("B*", (1, 3), 110.0)]
    report = delayed.Report((6.0, 28.0), (4.5, 26.0), 0.02, 8.0, runs, {4: 80.0})
    lines = list(delayed_report.markdown(report))
    cells = "120.0 (110.0-124.0) | 110.0 | -8.3% | 1.200 (1.100-1.240) | 2.0, 3.0 | 6.00, 28.00 | 0.25 | 0.350 | 0.05 |"
    assert f"| geometric | 4 | B* | 1, 3 | 3 | {cells}" in lines
    assert "Delays of 4.50 and 26.00 ms, found while other programs kept 0.02 CPUs busy." in lines
    assert lines[-1] == "Models that step together, 4 requests: 80.0 token/s."
    assert delayed.scaled((1, 5), 2.0, 8) == (1, 8)
    assert delayed.scaled((1, 5), 0.5, 8) == (1, 2)
    (tmp_path / "trouterd.toml").write_text(delayed.deployment((6.0, 28.0)).configuration(tmp_path))
    config = settings.load(tmp_path / "trouterd.toml", {})
    assert {route.algorithm.rpartition("/")[2] for route in config.routes.values()} == {
        "bernoulli",
        "every_n",
        "bursty.py",
    }


def test_neighbours_are_all_other_programs() -> None:
    """A process of this test's own is one of them, unless it is told to be none."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            known, unknown = Neighbours([busy.pid]), Neighbours([])
            known.start()
            unknown.start()
            end = ticks(busy.pid) + 30
            while ticks(busy.pid) < end:
                pass
            assert unknown.busy() > known.busy() + 0.02
        finally:
            busy.kill()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--requests", "4,0"], "--requests: expected a whole number from 1 on"),
        (["--steps", "0"], "--steps: a number from 1 on"),
        (["--daemon", "--seconds", "nan"], "times above 0"),
        (["--daemon", "--repeats", "0"], "--repeats: a number from 1 on"),
        (["--daemon", "--patterns", "geometric,odd"], "unknown patterns ['odd']"),
        (["--daemon", "--step-ms", "6,-1"], "times above 0"),
        (["--plots", "x"], "--plots: of what --daemon measures"),
        (["--daemon", "--plots", "x"], "pip install 'trouterd[bench]'"),
    ],
)
def test_options_are_looked_at_before_anything_is_measured(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit):
        batching.main(arguments)
    assert message in capsys.readouterr().err
