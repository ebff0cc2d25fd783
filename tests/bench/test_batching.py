"""The bench of the throughput model."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import batching


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
