"""What a window would have been at the rates that its moves should have been drawn at."""

from __future__ import annotations

from typing import Any

import pytest

from bench.experiment_case import Record
from bench.experiment_group import Group
from bench.experiment_rates import Moves, at_rates, correction, drawn, nominal, rates
from bench.patterns import PATTERNS, R2R, RSTITCH, Pattern
from tests.bench.experiment_fakes import case, record, result, window
from trouterd.batching.network import StepTime

SMALL_MS, LARGE_MS, HANDOFF_MS = 1.0, 18.0, 0.25


def one_stream(key: str, moves: Moves) -> Record:
    """A window of one stream that moved so often."""
    asked = case(key, 1, "planned")
    small_ms, large_ms = moves.small_steps * SMALL_MS, moves.large_steps * LARGE_MS
    per_token = small_ms + large_ms + 2 * moves.visits * HANDOFF_MS
    rate = 1e3 / per_token
    fields: dict[str, Any] = {
        "tokens_per_model": {"small": rate * (moves.small_steps - moves.visits), "large": rate * moves.large_steps},
        "handoffs_per_100": 200 * moves.visits,
        "batch": {"small": 1.0, "large": 1.0},
        "step_ms": {"small": SMALL_MS, "large": LARGE_MS},
        "busy": {"small": small_ms / per_token, "large": large_ms / per_token},
    }
    return Record(asked, window(asked, rate, **fields))


def moved(pattern: Pattern, p: float, q: float) -> Moves:
    return nominal(Pattern(pattern.name, pattern.key, pattern.head, p, q))


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.key)
def test_nominal_moves_are_those_of_the_throughput_model(pattern: Pattern) -> None:
    network = pattern.network([StepTime.affine(1.0), StepTime.affine(2.0)], (), 0.0)
    moves = nominal(pattern)
    assert moves.small_steps == pytest.approx(network.shares[0] / network.tokens_per_step)
    assert moves.large_steps == pytest.approx(network.shares[1] / network.tokens_per_step)
    assert (moves.p, moves.q) == pytest.approx((pattern.p, pattern.q))
    # Every token is written by somebody, and those that are dropped are the hand-overs.
    assert moves.small_steps - moves.visits + moves.large_steps == pytest.approx(1)


@pytest.mark.parametrize(("pattern", "p", "q"), [(R2R, 0.30, 1.0), (R2R, 0.41, 1.0), (RSTITCH, 0.38, 0.15)])
def test_a_window_that_missed_its_rates(pattern: Pattern, p: float, q: float) -> None:
    missed = one_stream(pattern.key, moved(pattern, p, q))
    met = one_stream(pattern.key, nominal(pattern))
    large = record(case("large", 1), 50.0)
    group = Group([result("a", [large, missed])])
    (one,) = group.select(subject=pattern.key)
    found = drawn(one)
    assert found is not None
    assert (found.p, found.q) == pytest.approx((p, q))
    wanted = met.window["tokens_per_second"]
    assert correction(group, one) == pytest.approx(wanted / one.rate)
    assert wanted / one.rate != pytest.approx(1, abs=0.02)
    ratio = at_rates(group, one, group.to_large(one))
    assert ratio is not None
    assert ratio.value == pytest.approx(wanted / 50)
    assert f"p {p:g} for {pattern.p:g}" in (rates(one) or "")


def test_windows_without_draws_are_left_alone() -> None:
    asked = case("every:4", 1, "eager")
    silent = case(R2R.key, 1, "planned", system="a foreign server")
    nobody = window(silent, 100.0, tokens_per_model={}, handoffs_per_100=None, batch={}, busy={}, step_ms={})
    group = Group([result("a", [record(case("large", 1), 50.0), record(asked, 100.0), Record(silent, nobody)])])
    for one in group.windows:
        assert rates(one) is None
        assert at_rates(group, one, group.to_large(one)) is None
