"""Integer masses against exp, and top_p against its definition in exact arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models.mass import UNIT_BITS, mass, share
from models.sampler import SamplingRows, processed

ONE = 1 << UNIT_BITS


@given(st.floats(-100, 0, width=32))
def test_a_mass_is_exp_within_the_rounding_of_float32(height: float) -> None:
    found = int(mass(torch.tensor([height]))[0])
    exact = ONE * math.exp(height)
    assert exact * (1 - 1e-8) - 1 <= found <= exact * (1 + 7e-8)


def test_ends() -> None:
    heights = torch.tensor([0.0, -0.0, -math.log(2), -29.2, -1e30, -math.inf])
    assert mass(heights).tolist() == [ONE, ONE, pytest.approx(ONE // 2, rel=1e-7), 0, 0, 0]


def test_a_share_is_rounded_up() -> None:
    parts, totals = torch.tensor([0.5, 0.5, 1e-6]), torch.tensor([10, 11, 10])
    assert share(parts, totals).tolist() == [5, 6, 1]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=60), st.floats(0.0009765625, 0.9990234375, width=32))
def test_top_p_keeps_the_smallest_prefix_that_has_its_share(levels: list[int], top_p: float) -> None:
    logits = torch.tensor([[level / 16 for level in levels]])
    rows = SamplingRows.greedy(1)
    rows.temperature[:] = 1
    rows.top_p[:] = top_p
    masses = mass(logits - logits.max())[0].tolist()
    goal, ahead, kept = Fraction(float(np.float32(top_p))) * sum(masses), 0, set()
    for name in sorted(range(len(levels)), key=lambda i: (-levels[i], i)):
        if ahead < goal:
            kept.add(name)
        ahead += masses[name]
    found = processed(logits, rows)[0]
    assert {name for name in range(len(levels)) if found[name] > -math.inf} == kept
