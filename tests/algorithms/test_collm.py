"""Co-LLM: the deferral row and its threshold over time, the two forms of a checkpoint, and tokens that both models make."""

from __future__ import annotations

import json
import logging
import math
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from algorithms.base import OutputView, RouteContext, StepResult
from algorithms.mixture import Opinion, likeliest
from algorithms.registry import AlgorithmError, load, numeric_params, validate_params
from tests.algorithms import reference
from tests.algorithms.heads import write_defer
from tests.algorithms.steps import quick, step

torch.set_num_threads(1)

V, H = 8, 12
MODELS = ("small", "large")
ROW = torch.randn(H, generator=torch.Generator().manual_seed(1))


def side(index: int = 0, defer: torch.Tensor | None = ROW, **params: Any) -> Any:
    definition = load("collm")
    context = RouteContext(MODELS, index, V, H, torch.device("cpu"), None, defer)
    return definition.sides(index)(context, validate_params(definition, params, MODELS))


def rows(built: Any, count: int = 64, at: list[int] | None = None, **params: float | list[float]) -> StepResult:
    generator = torch.Generator().manual_seed(5)
    result = step(torch.randn(count, V, generator=generator), numeric_params(built.params) | params, at)
    result.hidden = torch.randn(count, H, generator=generator)
    return result


@pytest.mark.parametrize("bias", [None, -0.7])
def test_both_forms_of_a_checkpoint(tmp_path: Path, bias: float | None) -> None:
    path = tmp_path / "defer.safetensors"
    score = write_defer(path, H, bias=bias)
    own, filed = side(threshold=0.5), side(checkpoint=str(path), threshold=0.5)
    given_rows = rows(own)
    torch.testing.assert_close(own.deferral(given_rows), (given_rows.hidden @ ROW).sigmoid())
    wanted = torch.tensor([score(hidden) for hidden in given_rows.hidden])
    torch.testing.assert_close(filed.deferral(given_rows), wanted, atol=1e-6, rtol=1e-6)
    whole = filed.deferral(given_rows)
    given_rows.hidden = given_rows.hidden[7:12]
    assert torch.equal(filed.deferral(given_rows), whole[7:12])
    assert own.pure


def test_the_threshold_is_strict_and_each_rows_own() -> None:
    built = side(threshold=0.4)
    p = built.deferral(rows(built))
    assert built.route(rows(built)).tolist() == (p > 0.4).long().tolist()
    assert 0 < built.route(rows(built)).sum() < len(p)
    assert not built.route(rows(built, threshold=p.tolist())).any()
    assert built.route(rows(built, threshold=torch.nextafter(p, torch.tensor(0.0)).tolist())).all()
    assert not built.route(rows(built, threshold=1.0)).any()
    assert built.route(rows(built, threshold=0.0)).all()


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "exponential"])
@pytest.mark.parametrize("threshold", [0.0, 0.15, 1.0])
def test_schedules_begin_at_one_and_end_at_the_threshold(schedule: str, threshold: float) -> None:
    built = side(threshold=threshold, schedule=schedule, warmup=10)
    at = list(range(16))
    given_rows = rows(built, len(at), at)
    wanted = [reference.eta(threshold, t, schedule, 10) for t in at]
    if schedule != "constant":
        assert wanted[0] == 1
        assert wanted == sorted(wanted, reverse=True)
        # Past the reach of rounding on either side: at 0 nothing is above 1.
        assert not built.route(given_rows)[0]
    assert wanted[10:] == [threshold] * 6
    inside = [t for t in at if 1e-4 < wanted[t] < 1 - 1e-4]
    for nudge in (-1e-5, 1e-5):
        targets = torch.tensor([min(max(value + nudge, 1e-6), 1 - 1e-6) for value in wanted], dtype=torch.float64)
        # Hidden states along the deferral row that give these probabilities.
        given_rows.hidden = (torch.logit(targets)[:, None] * (ROW.double() / (ROW.double() @ ROW.double()))).float()
        got = built.route(given_rows)
        assert [int(got[t]) for t in inside] == [int(nudge > 0)] * len(inside)


def test_where_the_threshold_comes_from(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    built = side()
    assert built.route(rows(built)).tolist() == (built.deferral(rows(built)) > 0.5).long().tolist()
    assert caplog.messages[-1].startswith("collm: threshold 0.5, not calibrated")
    path = tmp_path / "defer.safetensors"
    write_defer(path, H)
    content = {"threshold": 0.2, "hidden_size": H, "model": "Tiny", "algorithm": "collm"}
    Path(f"{path}.json").write_text(json.dumps(content))
    built = side(checkpoint=str(path))
    assert built.route(rows(built)).tolist() == (built.deferral(rows(built)) > 0.2).long().tolist()
    assert caplog.messages[-1] == f"collm: threshold 0.2, calibrated in {path}.json"


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "defer.weight: missing"),
        ({"defer.weight": torch.zeros(1, H + 1)}, f"defer.weight: has shape (1, {H + 1}), (1, {H}) is needed"),
        ({"defer.weight": torch.zeros(2, H)}, f"defer.weight: has shape (2, {H})"),
        ({"defer.weight": torch.zeros(1, H), "defer.bias": torch.zeros(2)}, "defer.bias: has shape (2,)"),
        ({"defer.weight": torch.zeros(1, H), "lm_head.weight": torch.zeros(1)}, "lm_head.weight: unknown tensor"),
        ({"defer.weight": torch.full((1, H), float("nan"))}, "defer.weight: holds values that are not finite"),
    ],
)
def test_files_that_do_not_fit(tmp_path: Path, tensors: dict[str, torch.Tensor], message: str) -> None:
    path = tmp_path / "defer.safetensors"
    save_file(tensors, path)
    with pytest.raises(AlgorithmError, match=re.escape(f"checkpoint: {path}: {message}")):
        side(checkpoint=str(path))


def test_other_refusals(tmp_path: Path) -> None:
    with pytest.raises(AlgorithmError, match=r"model 'small' has no <\|defer\|> row of its own"):
        side(defer=None)
    with pytest.raises(AlgorithmError, match="No such file"):
        side(checkpoint=str(tmp_path / "none.safetensors"))
    (tmp_path / "text").write_text("no tensors")
    with pytest.raises(AlgorithmError, match="text: not a safetensors file"):
        side(checkpoint=str(tmp_path / "text"))


def test_the_peer() -> None:
    peer = side(1)
    assert (peer.keep_sample, peer.pure) == (True, True)
    assert peer.route(rows(peer)).tolist() == [1] * 64
    assert peer.send(OutputView([1, 2, 3], 2, [0, 1], {}), 0).payload == b""
    composing = side(1, mode="compose")
    assert (composing.keep_sample, composing.pure) == (False, False)
    assert not side(0, mode="compose").pure


def view(length: int, state: dict[str, Any], banned: tuple[int, ...] = ()) -> OutputView:
    return OutputView(range(3 + length), 3, [length, length], state, banned)


def test_the_peers_opinion_reaches_the_entry() -> None:
    entry, peer = side(0, mode="compose", threshold=0.0, top=V), side(1, mode="compose", top=V)
    mine, theirs = rows(entry, 2, [4, 9]), rows(peer, 2, [4, 9])
    theirs.logits = theirs.logits.flip(-1)
    assert entry.route(mine).tolist() == peer.route(theirs).tolist() == [1, 1]
    for row, index in enumerate((4, 9)):
        payload = peer.send(view(index, theirs.state[row]), 0).payload
        share = float(entry.deferral(mine)[row])
        mixture = (1 - share) * mine.logits[row].softmax(-1) + share * theirs.logits[row].softmax(-1)
        best = mixture.argsort(descending=True).tolist()
        assert entry.combine(view(index, mine.state[row]), payload) == best[0]
        assert entry.combine(view(index, mine.state[row], (best[0],)), payload) == best[1]
        # The peer has written a token of its own meanwhile, or the entry has never asked.
        assert entry.combine(view(index + 1, mine.state[row]), payload) is None
        assert entry.combine(view(index, {}), payload) is None
        assert peer.send(view(index + 1, theirs.state[row]), 0).payload == b""


def test_an_opinion_holds_the_likeliest_tokens() -> None:
    opinion = Opinion.of(torch.tensor([0.0, 3.0, -math.inf, 1.0]), 7, 2)
    assert (opinion.index, opinion.ids) == (7, [1, 3])
    assert sum(math.exp(p) for p in opinion.log_probs) == pytest.approx(1 - 1 / (1 + math.exp(3) + math.e))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(opinion), type=Opinion) == opinion
    assert len(Opinion.of(torch.zeros(3), 0, 64).ids) == 3


@quick
@given(st.integers(0, 2**32), st.floats(0, 1), st.sets(st.integers(0, V - 1), max_size=V))
def test_the_likeliest_of_a_mixture(seed: int, share: float, banned: set[int]) -> None:
    generator = torch.Generator().manual_seed(seed)
    mine, other = (torch.randn(V, generator=generator).double() * 3 for _ in range(2))
    mixture = ((1 - share) * mine.softmax(-1) + share * other.softmax(-1)).tolist()
    got = likeliest(Opinion.of(mine, 0, V), Opinion.of(other, 0, V), share, banned)
    allowed = [token for token in range(V) if token not in banned]
    if not allowed:
        assert got is None
    else:
        assert got in allowed
        assert mixture[got] == pytest.approx(max(mixture[token] for token in allowed), rel=1e-5)
    equal = Opinion(0, [5, 2], [-1.0, -1.0])
    assert likeliest(equal, equal, share, ()) == 2
