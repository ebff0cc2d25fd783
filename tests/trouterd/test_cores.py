"""The cores that a process may use."""

from __future__ import annotations

from pathlib import Path

import pytest

from trouterd import cores


@pytest.mark.parametrize(
    ("quota", "expected"),
    [
        ("max 100000\n", 8),
        ("250000 100000\n", 2.5),
        ("1600000 100000\n", 8),
        ("", 8),
        ("100000 0\n", 8),
        ("many 100000\n", 8),
        (None, 8),
    ],
)
def test_a_quota_counts_where_it_is_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str | None, expected: float
) -> None:
    file = tmp_path / "cpu.max"
    if quota is not None:
        file.write_text(quota)
    monkeypatch.setattr(cores, "QUOTA", file)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    assert cores.available_cores() == expected
