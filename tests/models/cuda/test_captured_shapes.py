"""Which steps are captured."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from models.cuda.captured_shapes import Shapes
from models.device_runner import BUCKETS

ROWS = st.integers(0, BUCKETS[-1] + 2)


@given(ROWS, ROWS)
def test_the_smallest_shape_that_holds_a_step(total: int, wanted: int) -> None:
    shapes = Shapes(BUCKETS, extends=True)
    fitting = [shape for shape in shapes.all if shape[0] >= total and shape[1] >= wanted]
    assert shapes.of(total, wanted) == min(fitting, default=(0, 0))


@given(ROWS, ROWS)
def test_steps_of_one_token_each_alone(total: int, wanted: int) -> None:
    shapes = Shapes(BUCKETS, extends=False)
    assert shapes.all == tuple((bucket, bucket) for bucket in reversed(BUCKETS))
    decodes = total <= wanted <= BUCKETS[-1]
    assert (shapes.of(total, wanted) != (0, 0)) == decodes
