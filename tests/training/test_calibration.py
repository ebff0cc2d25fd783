"""Thresholds on made-up signals, where the share can be counted by hand, and on the demo pair."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models.test_defer import deferring
from tests.models.tiny import tiny_qwen3
from tests.training.pairs import config
from trouterd.training.calibrate_route import CalibrationRun
from trouterd.training.calibration import candidates, threshold_for_recall, threshold_for_share
from trouterd.training.faults import TrainingError
from trouterd.training.options import CalibrateOptions, PairOptions
from trouterd.training.signal import Series, Signal, large_tokens, share

VALUES = st.lists(st.floats(0, 1, width=32), min_size=1, max_size=30)


def nothing(*_: object) -> torch.Tensor:
    raise AssertionError("made-up series are not computed")


def series(*texts: list[float]) -> list[Series]:
    return [Series(torch.tensor(text), None) for text in texts]


@settings(max_examples=40)
@given(st.lists(VALUES, min_size=1, max_size=4), st.floats(0, 1), st.booleans())
def test_no_threshold_comes_closer_to_the_share(texts: list[list[float]], target: float, rises: bool) -> None:
    signal, texts_of = Signal(nothing, rises=rises), series(*texts)
    found = threshold_for_share(signal, texts_of, target)
    everything = torch.tensor([value for text in texts for value in text])
    best = min(abs(share(signal, texts_of, one) - target) for one in candidates(everything).tolist())
    assert abs(share(signal, texts_of, found) - target) == pytest.approx(best)


@settings(max_examples=40)
@given(VALUES, st.data(), st.floats(0.01, 1), st.booleans())
def test_recall_is_reached_with_the_fewest_rows(
    values: list[float], data: st.DataObject, target: float, rises: bool
) -> None:
    flags = data.draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values)).filter(any))
    rows, wanted, signal = torch.tensor(values), torch.tensor(flags), Signal(nothing, rises=rises)

    def found(threshold: float) -> float:
        return float((signal.asks(rows, threshold) & wanted).sum() / wanted.sum())

    def asked(threshold: float) -> int:
        return int(signal.asks(rows, threshold).sum())

    threshold = threshold_for_recall(rows, wanted, target, rises=rises)
    enough = [one for one in candidates(rows).tolist() if found(one) >= target - 1e-6]
    assert found(threshold) >= target - 1e-6
    assert asked(threshold) == min(asked(one) for one in enough)


def test_recall_of_nothing_is_refused() -> None:
    with pytest.raises(TrainingError, match="--min-recall"):
        threshold_for_recall(torch.rand(4), torch.zeros(4, dtype=torch.bool), 0.9, rises=True)


def test_runs_of_the_large_model() -> None:
    """It takes over at 0.9 (index 1), and keeps writing while it is unsure itself: up to index 3, where it is sure."""
    signal = Signal(nothing, nothing)
    text = Series(torch.tensor([0.1, 0.9, 0.1, 0.1, 0.1]), torch.tensor([0.9, 0.8, 0.7, 0.1, 0.9]))
    assert large_tokens(signal, text, 0.5) == 3
    assert large_tokens(signal, text, 0.05) == 5
    assert large_tokens(signal, text, 0.95) == 0


def test_one_decision_counts_for_the_whole_answer() -> None:
    signal = Signal(nothing, once=True)
    texts = series([0.9, 0.0, 0.0], [0.1, 0.9, 0.9, 0.9])
    assert [large_tokens(signal, text, 0.5) for text in texts] == [3, 0]
    assert share(signal, texts, threshold_for_share(signal, texts, 0.4)) == pytest.approx(3 / 7)


@pytest.mark.parametrize(
    ("algorithm", "params", "low", "high"),
    [
        ("entropy", {"threshold": 1.0, "measure": "margin"}, 0.3, 1),
        ("rstitch", {"tau": 0.5}, 0, 0.2),
    ],
)
def test_share_is_met_on_prompts_that_were_not_used(
    algorithm: str, params: dict[str, object], low: float, high: float
) -> None:
    options = CalibrateOptions(pair=PairOptions(prompts="demo:30", max_tokens=128), share=0.1)
    result = CalibrationRun(config(algorithm=algorithm, **params), "pair", options).run()
    assert result.routed is not None
    assert result.routed.share == pytest.approx(0.1, abs=0.03)
    assert low < result.threshold < high
    shares = [row.share for row in result.table]
    assert shares == sorted(shares)


def test_a_row_that_the_small_model_brings_along(tmp_path: Path) -> None:
    """A model of Co-LLM needs no checkpoint: its own row is calibrated."""
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("".join(f'{{"prompt": "{n} and {n * n}"}}\n' for n in range(8)))
    models = config(deferring(tmp_path / "small"), tiny_qwen3(tmp_path / "large", seed=1), "collm")
    options = CalibrateOptions(pair=PairOptions(prompts=str(prompts), max_tokens=12), share=0.4)
    result = CalibrationRun(models, "pair", options).run()
    assert result.parameter == "threshold"
    assert len({row.share for row in result.table}) > 1
    assert min(abs(row.share - 0.4) for row in result.table) < 0.2


def test_bernoulli_needs_no_text() -> None:
    options = CalibrateOptions(pair=PairOptions(prompts="demo:4"), share=0.25)
    result = CalibrationRun(config(algorithm="bernoulli", p=0.5), "pair", options).run()
    assert (result.parameter, result.threshold) == ("p", 0.25)


@pytest.mark.parametrize(
    ("algorithm", "params", "problem"),
    [
        ("every_n", {"shape": "visit", "n": 4}, "'every_n' has no threshold"),
        ("entropy", {"threshold": 1.0, "threshold_back": 0.1}, "params.threshold_back"),
    ],
)
def test_what_has_no_single_threshold_is_refused(algorithm: str, params: dict[str, object], problem: str) -> None:
    options = CalibrateOptions(pair=PairOptions(prompts="demo:4", max_tokens=8), share=0.25)
    run = CalibrationRun(config(algorithm=algorithm, **params), "pair", options)
    with pytest.raises(TrainingError, match=problem):
        run.run()
