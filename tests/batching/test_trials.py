"""Changes that are watched: which loads are compared, and what is taken back however prompts come."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from trouterd.batching.trials import (
    DIFFER,
    EARLY,
    FREEZE,
    HOLD,
    LONGEST,
    LONGEST_WATCH,
    MOST_PROMPTS,
    SETTLE,
    TRY,
    Load,
    Trials,
)


def test_the_first_trial_comes_early_where_promises_are_known_to_be_too_small() -> None:
    trials = Trials()
    assert not trials.due(100.0, early=True)
    assert not trials.due(100.0 + EARLY - 1, early=True)
    assert trials.due(100.0 + EARLY, early=True)
    # One without a verdict does not count.
    trials.watch(130.0, {}, Load(100.0, 8.0), 1.0, waits=True, trial=True)
    assert trials.judge(140.0, lambda _now, _seconds: Load(90.0, 16.0)) == {}
    assert not trials.due(140.0, early=True)
    assert trials.due(140.0 + EARLY, early=True)
    trials.watch(130.0, {}, Load(100.0, 8.0), 1.0, waits=True, trial=True)
    assert trials.judge(150.0, lambda _now, _seconds: Load(90.0, 8.0)) == {}
    # From then on as everywhere.
    assert not trials.due(150.0 + TRY, early=True)
    trials.forget()
    assert not trials.due(5000.0, early=True)
    assert not trials.due(5000.0 + EARLY, early=True)
    other = Trials()
    assert not other.due(100.0)
    assert not other.due(100.0 + EARLY)


def test_nothing_is_tried_while_changes_are_frozen() -> None:
    trials = Trials()
    assert not trials.due(0.0)
    trials.watch(TRY, {"large": [1, 2]}, Load(100.0, 8.0), 1.0, waits=False, trial=False)
    assert trials.judge(TRY + HOLD / 2, lambda now, seconds: Load(50.0, 8.0)) is None
    assert trials.pending(TRY + HOLD / 2)
    assert trials.judge(TRY + HOLD, lambda now, seconds: Load(50.0, 8.0)) == {"large": [1, 2]}
    assert trials.pending(TRY + HOLD + FREEZE - 1).startswith("taken back")
    assert not trials.pending(TRY + HOLD + FREEZE)


def test_a_freeze_from_before_is_brought_into_its_bounds() -> None:
    trials = Trials(1.0, 100.0, frozen=1e9, freeze=1e9)
    assert trials.frozen(100.0) == trials.freeze == LONGEST
    assert trials.frozen(100.0 + LONGEST) == 0
    assert Trials(1.0, 100.0, freeze=0.0).freeze == FREEZE


def test_trials_among_other_numbers_of_requests_decide_nothing() -> None:
    trials = Trials()
    before = {"large": [1, 2]}
    trials.watch(0.0, before, Load(100.0, 8.0), 1.1, waits=False, trial=True)
    assert trials.judge(HOLD, lambda now, seconds: Load(200.0, 16.0)) == before
    assert trials.trust == 1.0
    assert trials.due(TRY)


@pytest.mark.parametrize(
    ("before", "after", "judged"),
    [
        (Load(100.0, 8.0), Load(90.0, 8.0), True),
        # As many tokens in what prompts leave of the time.
        (Load(100.0, 8.0), Load(100.0 * (1 - DIFFER), 8.0, 0.999 * DIFFER), False),
        (Load(100.0, 8.0), Load(90.0 * (1 - DIFFER), 8.0, 0.999 * DIFFER), True),
        (Load(60.0, 8.0, 0.4), Load(63.0, 8.0, 0.3), True),
        (Load(30.0, 8.0, MOST_PROMPTS), Load(27.0, 8.0, MOST_PROMPTS), True),
    ],
)
def test_decode_rates_are_compared(before: Load, after: Load, judged: bool) -> None:
    trials = Trials()
    trials.watch(0.0, {}, before, 1.0, waits=True, trial=False)
    back = trials.judge(HOLD, lambda now, seconds: after)
    assert trials.trust == pytest.approx(0.9 if judged else 1.0, abs=0.001)
    assert (back is not None) == judged
    assert bool(trials.pending(HOLD)) == judged


@pytest.mark.parametrize(
    ("before", "after", "until"),
    [
        (Load(100.0, 8.0), Load(50.0, 8.0, 1.1 * DIFFER), LONGEST_WATCH),
        (Load(50.0, 8.0, 1.1 * DIFFER), Load(50.0, 8.0), LONGEST_WATCH),
        (Load(50.0, 8.0, MOST_PROMPTS), Load(20.0, 8.0, 1.01 * MOST_PROMPTS), LONGEST_WATCH),
        (Load(100.0, 8.0), Load(50.0, 4.0), LONGEST_WATCH),
        (Load(100.0, 8.0), Load(), LONGEST_WATCH),
        # To these nothing compares, however long it is looked at.
        (Load(20.0, 8.0, 1.01 * MOST_PROMPTS), Load(10.0, 8.0, MOST_PROMPTS), HOLD),
        (Load(0.0, 8.0), Load(90.0, 8.0), HOLD),
    ],
)
def test_a_change_among_other_loads_is_watched_for_longer_and_stays_unjudged(
    before: Load, after: Load, until: float
) -> None:
    trials = Trials()
    trials.watch(0.0, {}, before, 1.1, waits=True, trial=False)
    watched: list[float] = []

    def measured(now: float, seconds: float) -> Load:
        watched.append(seconds)
        return after

    for now in np.arange(5.0, until, 5.0).tolist():
        assert trials.judge(now, measured) is None
        assert trials.pending(now) == "watching the latest change"
    assert trials.judge(until, measured) is None
    assert trials.pending(until) == ""
    assert trials.trust == 1.0
    assert watched == np.arange(HOLD - SETTLE, until, 5.0).tolist()


def arrivals(each_second: float, prompt: float, dice: np.random.Generator) -> NDArray[np.float64]:
    """Shares of each second that go into prompts of so many seconds that come at random; what finds no time waits."""
    shares, waiting = np.zeros(int(HOLD + LONGEST_WATCH)), 0.0
    for second in range(len(shares)):
        waiting += prompt * dice.poisson(each_second)
        shares[second] = min(waiting, 0.95)
        waiting -= shares[second]
    return shares


def taken_back(each_second: float, prompt: float, factor: float, tokens: float) -> float:
    """Part of 200 changes that were taken back.

    Args:
        each_second: prompts.
        prompt: seconds of one.
        factor: by which the change alters the decode rate.
        tokens: decode rate in steps with prompts over that in others.
    """
    back = 0
    for seed in range(200):
        shares = arrivals(each_second, prompt, np.random.default_rng(seed))
        rates = 100 * (1 - (1 - tokens) * shares)
        rates[int(HOLD) :] *= factor

        def measured(
            now: float, seconds: float, shares: NDArray[np.float64] = shares, rates: NDArray[np.float64] = rates
        ) -> Load:
            span = slice(round(HOLD + now - seconds), round(HOLD + now))
            return Load(float(rates[span].mean()), 16.0, float(shares[span].mean()))

        trials, now = Trials(), 0.0
        trials.watch(now, {}, measured(0.0, HOLD), 1.0, waits=True, trial=False)
        while trials.pending(now) == "watching the latest change":
            now += 5
            back += trials.judge(now, measured) is not None
    return back / 200


@pytest.mark.parametrize("tokens", [0.0, 0.1])
@pytest.mark.parametrize(
    ("each_second", "prompt", "least"),
    [(2, 0.02, 0.99), (1, 0.1, 0.97), (2, 0.1, 0.95), (1, 0.3, 0.85), (0.5, 0.5, 0.8), (2, 0.2, 0.85), (2, 0.3, 0.55)],
)
def test_changes_are_judged_by_what_they_do_however_prompts_come(
    each_second: float, prompt: float, least: float, tokens: float
) -> None:
    """Prompts that come at random take 4 to 60 % of the time."""
    assert taken_back(each_second, prompt, 0.8, tokens) >= least
    assert taken_back(each_second, prompt, 1.0, tokens) <= (0.2 if each_second * prompt > 0.5 else 0.05)
    assert taken_back(each_second, prompt, 1.15, tokens) <= 0.01
