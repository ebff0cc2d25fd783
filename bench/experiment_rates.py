"""How often requests really moved in a window, beside the rates at which moves are drawn, and what it would have reached at those.

A window of some seconds draws some hundred moves of every stream, and misses a rate by some percent. Windows of one run draw alike,
so that they miss it together, and no comparison of routed windows shows it; one with the large model alone does.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from bench.experiment_case import LARGE, SMALL
from bench.experiment_group import Group, Measured, Ratio
from bench.experiment_markdown import cell
from bench.experiment_time import spent
from bench.patterns import PATTERNS, Pattern

_PATTERNS = {pattern.key: pattern for pattern in PATTERNS}


@dataclass(frozen=True, slots=True)
class Moves:
    """Per token of an answer; the small model's token is dropped where it hands over."""

    small_steps: float
    large_steps: float
    visits: float
    """Of the large model: a hand-off there and one back."""

    @property
    def p(self) -> float:
        """Share of the small model's steps that hand over."""
        return self.visits / self.small_steps

    @property
    def q(self) -> float:
        """Share of the large model's steps that hand back."""
        return self.visits / self.large_steps


def nominal(pattern: Pattern) -> Moves:
    """In the long run."""
    small_steps = 1 / (1 - pattern.p + pattern.p / pattern.q)
    visits = small_steps * pattern.p
    return Moves(small_steps, visits / pattern.q, visits)


def drawn(one: Measured) -> Moves | None:
    """In a window; None where it says nothing of who wrote what, or nobody moved."""
    written = one.record.window.get("tokens_per_model") or {}
    handoffs = one.of("handoffs_per_100")
    small, large = float(written.get(SMALL, 0.0)), float(written.get(LARGE, 0.0))
    if not handoffs or not large or set(written) - {SMALL, LARGE}:
        return None
    visits, tokens = handoffs / 200, small + large
    return Moves(small / tokens + visits, large / tokens, visits)


def rates(one: Measured) -> str | None:
    """Drawn and nominal, for tables; None where nothing is drawn or known."""
    pattern, found = _PATTERNS.get(one.case.subject), drawn(one)
    if pattern is None or found is None:
        return None
    text = f"p {cell(found.p)} for {cell(pattern.p)}"
    return f"{text}, q {cell(found.q)} for {cell(pattern.q)}" if pattern.writes_on else text


def correction(group: Group, one: Measured) -> float | None:
    """By which its token/s would differ at the nominal rates; None: not known.

    To first order: the time that requests spend in steps of each model grows with the steps that they take there for a token, the
    time between steps with the hand-offs.
    """
    pattern, found, time = _PATTERNS.get(one.case.subject), drawn(one), spent(group, one)
    if pattern is None or found is None or time is None:
        return None
    wanted = nominal(pattern)
    at_rates = time.small * wanted.small_steps / found.small_steps
    at_rates += time.large * wanted.large_steps / found.large_steps
    at_rates += time.waiting * wanted.visits / found.visits
    return (time.small + time.large + time.waiting) / at_rates


def at_rates(group: Group, one: Measured, ratio: Ratio | None) -> Ratio | None:
    """A ratio of its token/s to those of a window without draws, were the rates the nominal ones."""
    factor = correction(group, one)
    return None if ratio is None or factor is None else ratio.times(factor)


def chance(group: Group, one: Measured) -> float:
    """Standard error of a window's token/s by its draws alone, as a part of it, were each draw independent; 0 where nobody moves.

    A visit is a run of steps of either model, of geometric lengths, and token/s are the tokens of visits by their times. So, to
    first order (delta method), steps of a kind whose time is that of the tokens they bring add nothing, and other ones the
    variance of their number. What stratified draws and the correction to nominal rates take away from that is not counted: with
    these it is an upper bound.
    """
    moves, time, visits = drawn(one), spent(group, one), _visits(one)
    if not visits:
        return 0.0
    if moves is None or time is None:
        return 1 / sqrt(visits)
    variance = 0.0
    for steps, rate, in_steps in ((moves.small_steps, moves.p, time.small), (moves.large_steps, moves.q, time.large)):
        gain = 1 - in_steps / steps / time.total  # tokens of a step, less those that come in its time
        variance += gain**2 * max(0.0, 1 - rate) / rate**2
    return moves.visits * sqrt(variance / visits)


def tokens(one: Measured) -> float:
    """That a window's figures stand on, of all its repeats."""
    window = one.record.window
    return one.rate * float(window["seconds"]) * max(1, len(window.get("repeats") or ()))


def _visits(one: Measured) -> float:
    """Of the large model, in the same time."""
    return tokens(one) * (one.of("handoffs_per_100") or 0.0) / 200
