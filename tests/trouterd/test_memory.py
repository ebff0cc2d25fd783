"""Dividing a GPU: small numbers worked out by hand, and random cards against a search token by token."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trouterd.memory import Card, Claim, FitError, Footprint, Memory, common_tokens


def claim(weights: int, graphs: int = 0, workspace: int = 0, kv: int = 1, **sizes: int) -> Claim:
    footprint = Footprint(weights=weights, graphs=graphs, workspace=workspace, kv_bytes_per_token=kv)
    return Claim(**({"page_size": 1, "context": 1, "most": 1 << 40, "footprint": footprint} | sizes))


def card(fraction: float = 0.9, total: int = 100, free: int | None = None, **claims: Claim) -> Card:
    """A card on which nobody else holds anything, unless `free` says so."""
    held = sum(c.footprint.weights for c in claims.values())
    return Card(0, Memory(total, total - held if free is None else free), fraction, claims)


def test_worked_example() -> None:
    """Total 100, fraction 0.9, weights 40, graphs 8, workspace 2: KV gets 40."""
    one = card(a=claim(40, graphs=8, workspace=2))
    assert (one.budget, one.fixed, one.room) == (90, 50, 40)
    assert common_tokens([one]) == 40


def test_models_of_a_card_get_the_same_number_of_tokens() -> None:
    shared = card(small=claim(10, graphs=2, kv=1), large=claim(50, workspace=4, kv=3))
    assert common_tokens([shared]) == 24 // 4


def test_model_that_can_use_less_leaves_the_rest() -> None:
    shared = card(small=claim(10, kv=1, most=3), large=claim(50, kv=3))
    found = common_tokens([shared])
    assert found == (30 - 3) // 3
    assert [c.tokens(found) for c in shared.claims.values()] == [3, 9]


def test_little_stays_free_whatever_the_fraction() -> None:
    assert common_tokens([card(1.0, 256 * 10, a=claim(560))]) == 2560 - 560 - 10


def test_number_of_its_own_is_taken_off_first() -> None:
    shared = card(small=claim(10, kv=1, fixed_tokens=20), large=claim(50, kv=2))
    found = common_tokens([shared])
    assert found == 5
    assert [c.tokens(found) for c in shared.claims.values()] == [20, 5]


def test_split_model_takes_what_its_fullest_card_has() -> None:
    split = claim(20, kv=1)
    first, second = card(a=split, b=claim(50, kv=1)), Card(1, Memory(100, 80), 0.9, {"a": split})
    assert common_tokens([first, second]) == 10


def test_what_others_hold_is_not_there() -> None:
    assert common_tokens([card(free=15, a=claim(40, graphs=8, workspace=2))]) == 5


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (
            card(0.5, a=claim(40, graphs=8, workspace=12)),
            r"gpu\.memory_fraction: a need 0\.600 of GPU 0 without any KV, or raise gpu\.memory_fraction: 1 is the largest",
        ),
        (
            card(0.9, free=8, a=claim(40, graphs=8, workspace=2)),
            r"a need 0\.500 of GPU 0 .*; 0\.48 is the largest gpu\.memory_fraction that fits there, the rest is taken",
        ),
        (
            card(0.9, a=claim(40), b=claim(40, context=15, page_size=4)),
            r"models\.b\.context_length: one context of 15 tokens does not fit: GPU 0 has room for 5 KV tokens of each",
        ),
        (
            card(0.9, a=claim(40, kv=2, fixed_tokens=60, page_size=4)),
            r"models\.a\.kv_tokens: 60 tokens take .* of GPU 0; at most 24 fit, or raise gpu\.memory_fraction: 1 is",
        ),
    ],
)
def test_what_does_not_fit_says_what_would(one: Card, words: str) -> None:
    with pytest.raises(FitError, match=words) as caught:
        common_tokens([one])
    assert "\n" not in str(caught.value)


def test_the_count_named_in_the_message_fits() -> None:
    with pytest.raises(FitError) as caught:
        common_tokens([card(0.93, 1000, a=claim(400, kv=7, fixed_tokens=100, page_size=4), b=claim(10, kv=2))])
    found = re.search(r"at most (\d+) fit", str(caught.value))
    assert found
    fits = int(found[1])
    assert fits % 4 == 0
    common_tokens([card(0.93, 1000, a=claim(400, kv=7, fixed_tokens=fits, page_size=4), b=claim(10, kv=2))])


claims = st.builds(
    claim,
    weights=st.integers(0, 60),
    graphs=st.integers(0, 9),
    workspace=st.integers(0, 9),
    kv=st.integers(1, 4),
    context=st.integers(1, 8),
    most=st.integers(1, 60),
    fixed_tokens=st.sampled_from([0, 0, 0, 5, 11]),
)


@given(st.lists(claims, min_size=1, max_size=3), st.integers(50, 300), st.floats(0.3, 1.0), st.integers(0, 50))
def test_never_more_than_the_budget_and_never_less_than_fits(
    held: list[Claim], total: int, fraction: float, foreign: int
) -> None:
    named = {str(number): c for number, c in enumerate(held)}
    free = total - foreign - sum(c.footprint.weights for c in held)
    if free < 0:
        return
    one = Card(0, Memory(total, free), fraction, named)

    def taken(common: int) -> int:
        return sum(c.footprint.fixed + c.tokens(common) * c.footprint.kv_bytes_per_token for c in held)

    limit = min(int(total * fraction), total - foreign - total // 256)
    fitting = [count for count in range(total + 1) if taken(count) <= limit]
    try:
        found = common_tokens([one])
    except FitError:
        automatic = [c for c in held if not c.fixed_tokens]
        assert not fitting or any(c.tokens(fitting[-1]) < c.least for c in automatic)
        return
    assert taken(found) <= limit
    assert taken(found) == taken(fitting[-1])
