"""Step times by requests and rows, and the rows that a routing implies."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.batching.test_simulator import networks
from trouterd.batching.measured import read_step_time
from trouterd.batching.network import Network, NetworkError, StepTime, keep_commit, rewrite_commit
from trouterd.batching.row_time import Extends, RowTime, fed, rows_told

RECORDED = Path(__file__).with_name("recorded_step.json")
"""Of bench.step on a CPU: a random Qwen3 of 4 layers, decode at contexts 64 and 384, extend at 256."""

KEPT = Path(__file__).parents[2] / "bench/results/1x-h200"
"""Results that are part of the repository."""

SECONDS = st.floats(0, 10)
EXTENDS = st.builds(
    Extends, st.lists(st.tuples(st.integers(1, 64), st.integers(2, 32), SECONDS), min_size=1, max_size=12).map(tuple)
)
TIMES = st.builds(
    RowTime, st.builds(StepTime.affine, st.floats(0.1, 10), st.floats(0, 1)), st.none() | EXTENDS, st.floats(0, 1)
)


@settings(max_examples=200, deadline=None)
@given(TIMES, st.floats(1, 200), st.floats(1, 200), st.floats(1, 200))
def test_more_rows_are_never_cheaper(time: RowTime, batch: float, rows: float, more: float) -> None:
    fewer, most = time.at(min(rows, more)).of(batch), time.at(max(rows, more)).of(batch)
    assert time.decode.of(batch) * (1 - 1e-9) <= fewer <= most * (1 + 1e-9)


@settings(max_examples=100, deadline=None)
@given(TIMES)
def test_one_row_is_a_decode_step(time: RowTime) -> None:
    assert time.at(1) is time.decode


def test_a_third_number_counts_rows() -> None:
    time = RowTime.affine(18.2, 0.02, 0.06)
    for batch in (1, 5, 40):
        for rows in (1.0, 2.5, 10.0):
            assert time.at(rows).of(batch) == pytest.approx(18.2 + 0.02 * batch + 0.06 * batch * rows)
    assert RowTime.affine(18.2, 0.02).at(10.0) == StepTime.affine(18.2, 0.02)
    with pytest.raises(NetworkError, match="per row must be 0 or more"):
        RowTime(StepTime.affine(1), None, -1)


def test_lines_between_measured_extends() -> None:
    extends = Extends(((2, 2, 1.0), (2, 4, 3.0), (8, 2, 4.0), (8, 4, 8.0)))
    assert extends.seconds(2, 4) == 3
    assert extends.seconds(2, 1.5) == 0.5  # from nothing at one row on
    assert extends.seconds(5, 2) == pytest.approx((1 + 4) / 2)
    # Fifteen rows in all are nearly sixteen, which take 4, and eight take 3; between requests and rows of each it is (2 + 6) / 2.
    assert extends.seconds(5, 3) == pytest.approx(3 + 7 / 8)
    assert extends.seconds(1, 3) == 1  # below the smallest batch, as few rows as two requests of two have
    assert extends.seconds(2, 8) == 4  # more rows than measured of two requests: sixteen in all
    assert extends.seconds(2, 12) == pytest.approx(4 + 4 / 2)
    assert extends.seconds(8, 8) == 16
    assert extends.seconds(16, 4) == 16
    for bad in ((), ((1, 1, 0.1),), ((0, 2, 0.1),), ((1, 2, -0.1),), ((1, 2, float("nan")),)):
        with pytest.raises(NetworkError, match="extend steps"):
            Extends(bad)


@pytest.mark.parametrize(
    ("model", "decode", "visits"), [("Qwen3-0.6B", 2.02e-3, 2.73e-3), ("Qwen3-32B", 19.0e-3, 30.7e-3)]
)
def test_files_that_are_kept(model: str, decode: float, visits: float) -> None:
    measured = read_step_time(KEPT / f"{model}.step.json", 1024)
    assert measured.model == model
    assert measured.time.decode.of(16) == pytest.approx(decode, rel=0.01)
    assert measured.time.at(10).of(16) == pytest.approx(visits, rel=0.03)


@pytest.mark.parametrize(
    ("batch", "rows", "one_row", "measured"),
    [(4, 3, 18.14, 18.24), (14, 3, 18.42, 19.47), (40, 3, 19.67, 22.82), (12, 10, 18.40, 22.73)],
)
def test_extends_between_measured_ones(batch: int, rows: int, one_row: float, measured: float) -> None:
    """Qwen3-32B on an H200, milliseconds: extend steps at context 1024, and steps of other sizes, measured apart at context 600.

    There is a jump from 128 to 160 rows in all. Twelve requests of ten rows are on this side of it, sixteen on the other, so that
    half of what these take, with requests and rows of each alone, would be 26.2.
    """
    steps = ((1, 0.12, 0.13), (4, 0.0, 1.10), (16, 0.63, 11.21), (32, 2.02, 23.12), (64, 8.66, 55.53))
    extends = Extends(
        tuple((own, count, more) for own, *both in steps for count, more in zip((3, 10), both, strict=True))
    )
    for own, count, more in extends.cases:
        assert extends.seconds(own, count) == more
    assert one_row + extends.seconds(batch, rows) == pytest.approx(measured, rel=0.055)
    time = RowTime(StepTime.affine(one_row), extends)
    assert time.at(rows).of(batch) == pytest.approx(one_row + extends.seconds(batch, rows))


@pytest.mark.parametrize(
    ("network", "rows"),
    [
        (Network.pair((StepTime.affine(1),) * 2, 0.1), (1, 10)),
        (Network.pair((StepTime.affine(1),) * 2, 0.35), (1, 1 / 0.35)),
        # The peer's runs of 1 / q tokens come back at once.
        (Network.pair((StepTime.affine(1),) * 2, 0.347, 0.177), (0.653 + 0.347 / 0.177, 1 + 0.177 * 0.653 / 0.347)),
        (Network((StepTime.affine(1),) * 2, ((0.9, 0.1), (1.0, 0.0)), keep_commit(2)), (1.1, 11)),
        (Network((StepTime.affine(1),) * 3, ((0.5, 0.3, 0.2),) * 3, keep_commit(3)), (2, 1 / 0.3, 5)),
        # Whoever comes to a peer stays there, though half of the requests go to the other one.
        (Network((StepTime.affine(1),) * 3, ((0, 0.5, 0.5), (0, 1, 0), (0, 0, 1)), keep_commit(3)), (1, 1, 1)),
        # One model is never visited, one is left for good.
        (Network.pair((StepTime.affine(1),) * 2, 0.0), (1, 1)),
        (Network((StepTime.affine(1),) * 2, ((0.0, 1.0), (0.0, 1.0)), rewrite_commit(2)), (1, 1)),
    ],
)
def test_rows_that_a_routing_implies(network: Network, rows: tuple[float, ...]) -> None:
    assert network.rows_per_step == pytest.approx(rows)


@settings(max_examples=15, deadline=None)
@given(networks(), st.integers(0, 2**32))
def test_rows_of_a_request_that_is_followed(network: Network, seed: int) -> None:
    """Each model is fed what was committed since its last step; against the formula."""
    dice, steps = np.random.default_rng(seed), 8_000
    fed_rows, visits, missed, at = [0.0] * network.size, [0] * network.size, [0.0] * network.size, 0
    for _ in range(steps):
        fed_rows[at] += missed[at]
        missed[at] = 0
        visits[at] += 1
        to = int(dice.choice(network.size, p=np.array(network.routing[at]) / sum(network.routing[at])))
        missed = [one + network.commit[at][to] for one in missed]
        at = to
    for own, count, rows in zip(fed_rows, visits, network.rows_per_step, strict=True):
        if count > 1_000 and rows < 20:
            assert max(1.0, own / count) == pytest.approx(rows, rel=0.15)


def test_only_the_visited_models_change() -> None:
    times = RowTime.affine(1, 0.02), RowTime.affine(18.2, 0.02, 0.06)
    network = fed(Network.pair([time.decode for time in times], 0.1), times)
    assert network.step_times[0] == network.decode_times[0] == StepTime.affine(1, 0.02)
    assert network.decode_times[1].of(16) == pytest.approx(18.2 + 16 * 0.08)
    assert network.step_times[1].of(16) == pytest.approx(18.2 + 16 * 0.02 + 160 * 0.06)
    assert rows_told(network) == "; rows per request and step: model 0 1.0, model 1 10.0"
    zoomed = network.zoomed(4)
    assert zoomed.decode_times[1].of(4) == pytest.approx(network.decode_times[1].of(16))
    plain = RowTime.affine(1), RowTime.affine(8)
    assert rows_told(fed(Network.pair([time.decode for time in plain], 0.1), plain)) == ""


def test_recorded_extend_steps() -> None:
    result = json.loads(RECORDED.read_text())
    measured = {(case["batch"], case["count"]): case["wall_ms"] / 1e3 for case in result["extend"]}
    time = read_step_time(RECORDED).time
    decode = {case["batch"]: case["wall_ms"] / 1e3 for case in result["decode"] if case["context"] == 64}
    for (batch, count), seconds in measured.items():
        more = seconds - measured[batch, 1]
        assert time.at(count).of(batch) == pytest.approx(decode[batch] + max(0.0, more if count > 1 else 0.0), rel=0.05)
    longer = read_step_time(RECORDED, 384).time
    assert longer.extends == time.extends
    assert longer.decode != time.decode


def test_extend_steps_without_any_of_one_row(tmp_path: Path) -> None:
    """Against decode steps, at the context of the extend steps."""

    def case(context: int, ms: float, **more: int) -> dict[str, float]:
        return {"batch": 4, "context": context, "wall_ms": ms, **more}

    path = tmp_path / "step.json"
    path.write_text(json.dumps({"decode": [case(100, 5.0), case(300, 7.0)], "extend": [case(200, 9.0, count=4)]}))
    time = read_step_time(path).time
    assert time.at(4).of(4) == pytest.approx((5 + 9 - 6) * 1e-3)
    path.write_text(json.dumps({"decode": [case(100, 5.0)], "extend": [case(200, 9.0, count=1)]}))
    assert read_step_time(path).time.extends is None
