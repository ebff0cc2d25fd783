"""Which steps are captured, and which of these are planned all the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.cuda.captured_shapes import DECODE_ROWS, NO_SHAPE, Shapes
from models.cuda.decoder import RAGGED_KEYS, RAGGED_ROWS, CudaDecoder
from models.device_runner import BUCKETS
from models.rows import Runs

if TYPE_CHECKING:
    from models.cuda.captured_shapes import Shape

ROWS = st.integers(0, BUCKETS[-1] + 2)


@given(ROWS, ROWS)
def test_the_smallest_shape_that_holds_a_step(total: int, wanted: int) -> None:
    shapes = Shapes(BUCKETS, extends=True)
    fitting = [shape for shape in shapes.all if shape[0] >= total and shape[1] >= wanted]
    assert shapes.of(total, wanted) == min(fitting, default=NO_SHAPE)


@given(ROWS, ROWS)
def test_steps_of_one_token_each_alone(total: int, wanted: int) -> None:
    shapes = Shapes(BUCKETS, extends=False)
    assert shapes.all == tuple((bucket, bucket) for bucket in reversed(BUCKETS) if bucket <= DECODE_ROWS)
    decodes = total <= wanted <= DECODE_ROWS
    assert (shapes.of(total, wanted) != NO_SHAPE) == decodes


@pytest.mark.parametrize(
    ("step", "shape"),
    [
        ((16, 16), (16, 16)),
        ((48, 16), (48, 48)),
        ((160, 16), (168, 48)),
        ((180, 64), (184, 96)),
        ((192, 64), (200, 64)),
        ((201, 200), (224, 224)),
        ((300, 100), (320, 128)),
        ((512, 1), (512, 128)),
        ((257, 257), NO_SHAPE),
        ((512, 129), NO_SHAPE),
        ((513, 1), NO_SHAPE),
    ],
)
def test_logits_are_not_computed_for_many_more_rows_than_want_them(step: Shape, shape: Shape) -> None:
    assert Shapes(BUCKETS, extends=True).of(*step) == shape


def test_scratch_is_for_the_largest_of_each() -> None:
    assert Shapes(BUCKETS, extends=True).most == (BUCKETS[-1], DECODE_ROWS)
    assert Shapes((1, 2, 4), extends=True).most == (4, 4)


@pytest.mark.parametrize(
    ("rows", "run", "keys", "present", "planned"),
    [
        (512, 512, RAGGED_KEYS, True, True),
        (512, RAGGED_ROWS, RAGGED_KEYS, True, True),
        (512, 512, RAGGED_KEYS, False, False),
        (512, RAGGED_ROWS - 1, RAGGED_KEYS, True, False),
        (512, 512, RAGGED_KEYS - 1, True, False),
        (256, 256, RAGGED_KEYS, True, False),
    ],
)
def test_long_runs_are_planned(rows: int, run: int, keys: int, present: bool, planned: bool) -> None:
    """By the kernel of large steps, if it is there; smaller steps are replayed."""
    decoder = cast(CudaDecoder, SimpleNamespace(_has_ragged=lambda: present))
    counts = np.array([run, *[1] * (rows - run)])
    starts = np.array([keys - run, *[0] * (rows - run)])
    runs = Runs(firsts=np.cumsum(counts) - counts, counts=counts, starts=starts, slots=np.arange(len(counts)))
    assert CudaDecoder.plans(decoder, rows, runs) is planned
