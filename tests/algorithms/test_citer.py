"""CITER's head against the network as its paper's code lays it out, where thresholds come from, and files that do not fit."""

from __future__ import annotations

import json
import logging
import random
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from algorithms.base import RouteContext, StepResult
from algorithms.registry import AlgorithmError, load, numeric_params, validate_params
from tests.algorithms.heads import confidence_net, write_confidence
from tests.algorithms.steps import step, uniform_over

torch.set_num_threads(1)

V, H = 8, 12
MODELS = ("small", "large")
OFFICIAL = {
    *(f"mlp.{layer}.{part}" for layer in (0, 1, 4) for part in ("weight", "bias")),
    *(f"mlp.1.{part}" for part in ("running_mean", "running_var", "num_batches_tracked")),
    "linear.weight",
    "linear.bias",
}


def side(checkpoint: Path, algorithm: str = "citer", index: int = 0, hidden: int = H, **params: Any) -> Any:
    definition = load(algorithm)
    context = RouteContext(MODELS, index, V, hidden, torch.device("cpu"))
    return definition.sides(index)(
        context, validate_params(definition, {"checkpoint": str(checkpoint), **params}, MODELS)
    )


def rows(built: Any, count: int = 64, **params: float | list[float]) -> StepResult:
    """Rows of random hidden states; parameters that are not given are the configured ones."""
    values = numeric_params(built.params) | params
    given = step([uniform_over(1 + n % 4, V) for n in range(count)], values)
    given.hidden = torch.randn(count, H, generator=torch.Generator().manual_seed(5))
    return given


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    write_confidence(tmp_path / "mlp_iter_2876.pth", confidence_net(H))
    return tmp_path / "mlp_iter_2876.pth"


def sidecar(checkpoint: Path, **changes: Any) -> None:
    content = {"threshold": 0.7, "hidden_size": H, "model": "Tiny-0.6B", "algorithm": "citer", "loss": 0.1} | changes
    Path(f"{checkpoint}.json").write_text(json.dumps(content))


def test_equals_the_unfolded_network(tmp_path: Path) -> None:
    net = confidence_net(H)
    score = write_confidence(tmp_path / "head.pth", net)
    assert set(torch.load(tmp_path / "head.pth", weights_only=True)) == OFFICIAL
    built = side(tmp_path / "head.pth")
    given = rows(built)
    got = built.confidence(given)
    wanted = torch.tensor([score(hidden) for hidden in given.hidden])
    assert wanted.std() > 0.1
    torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-6)
    assert got.dtype == torch.float32
    assert built.pure


def test_a_row_does_not_depend_on_the_others(checkpoint: Path) -> None:
    built = side(checkpoint)
    given = rows(built)
    whole = built.confidence(given)
    for start, end in ((0, 1), (3, 8), (17, 50), (63, 64)):
        part = rows(built, end - start)
        part.hidden = given.hidden[start:end]
        assert torch.equal(built.confidence(part), whole[start:end])


def test_the_threshold_is_strict_and_each_rows_own(checkpoint: Path) -> None:
    built = side(checkpoint, threshold=0.5)
    s = built.confidence(rows(built))
    assert built.route(rows(built)).tolist() == (s < 0.5).long().tolist()
    assert 0 < built.route(rows(built)).sum() < len(s)
    assert not built.route(rows(built, threshold=s.tolist())).any()
    assert built.route(rows(built, threshold=torch.nextafter(s, torch.tensor(2.0)).tolist())).all()
    assert not built.route(rows(built, threshold=0.0)).any()
    assert built.route(rows(built, threshold=1.5)).all()


def test_where_the_threshold_comes_from(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    s = side(checkpoint).confidence(rows(side(checkpoint, threshold=0.3)))
    built = side(checkpoint)
    assert built.route(rows(built)).tolist() == (s < torch.tensor(0.98)).long().tolist()
    assert caplog.records[-1].levelname == "WARNING"
    assert "citer: threshold 0.98, not calibrated" in caplog.messages[-1]
    assert "citer: threshold 0.3, as configured" in caplog.messages
    sidecar(checkpoint)
    built = side(checkpoint)
    assert built.route(rows(built)).tolist() == (s < torch.tensor(0.7)).long().tolist()
    assert caplog.messages[-1] == f"citer: threshold 0.7, calibrated in {checkpoint}.json"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm": "collm"}, "algorithm: 'collm'; the head must be one of citer"),
        ({"hidden_size": 2 * H}, f"hidden_size: {2 * H}, of 'Tiny-0.6B'; the entry model has {H}"),
        ({"threshold": 1.5}, "threshold: 1.5; must be 0 to 1"),
        ({"threshold": "high"}, "Expected `float`, got `str` - at `$.threshold`"),
        ({"model": None}, "$.model"),
    ],
)
def test_sidecars_that_do_not_fit(checkpoint: Path, changes: dict[str, Any], message: str) -> None:
    sidecar(checkpoint, **changes)
    with pytest.raises(AlgorithmError, match=re.escape(message)) as failure:
        side(checkpoint)
    assert f"checkpoint: {checkpoint}.json: " in str(failure.value)


def test_a_sidecar_that_is_no_json(checkpoint: Path) -> None:
    Path(f"{checkpoint}.json").write_bytes(b'{"threshold": \xff')
    with pytest.raises(AlgorithmError, match=r"mlp_iter_2876\.pth\.json: "):
        side(checkpoint)


class Code:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("code ran",)


@pytest.mark.parametrize("name", sorted(OFFICIAL - {"mlp.1.num_batches_tracked"}))
def test_a_missing_tensor(checkpoint: Path, name: str) -> None:
    state = torch.load(checkpoint, weights_only=True)
    del state[name]
    torch.save(state, checkpoint)
    with pytest.raises(
        AlgorithmError, match=rf"^checkpoint: {re.escape(str(checkpoint))}: {re.escape(name)}: missing$"
    ):
        side(checkpoint)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mlp.4.weight": torch.zeros(H, 2 * H + 1)}, f"mlp.4.weight: has shape ({H}, {2 * H + 1})"),
        ({"linear.weight": torch.zeros(H)}, f"linear.weight: has shape ({H},), a matrix is needed"),
        ({"mlp.7.weight": torch.zeros(1)}, "mlp.7.weight: unknown tensor (1 in all)"),
        ({"linear.bias": 3.0}, "state_dict: must map names to tensors"),
        ({"linear.bias": Code()}, "code is never run"),
        ({"linear.bias": torch.full((1,), float("nan"))}, "linear.bias: holds values that are not finite"),
        ({"mlp.0.bias": torch.full((2 * H,), float("-inf"))}, "mlp.0.bias: holds values that are not finite"),
        (
            {"linear.bias": torch.zeros(1, dtype=torch.int64)},
            "linear.bias: is no dense tensor of floating-point numbers",
        ),
        ({"linear.bias": torch.zeros(1, dtype=torch.complex64)}, "linear.bias: is no dense tensor"),
        ({"mlp.0.bias": torch.zeros(2 * H).to_sparse()}, "mlp.0.bias: is no dense tensor"),
        ({"linear.bias": torch.zeros(1, device="meta")}, "linear.bias: is no dense tensor"),
    ],
)
def test_a_file_that_does_not_fit(
    checkpoint: Path, change: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(torch.load(checkpoint, weights_only=True) | change, checkpoint)
    with pytest.raises(AlgorithmError, match=re.escape(message)) as failure:
        side(checkpoint)
    assert str(checkpoint) in str(failure.value)
    assert "code ran" not in capsys.readouterr().out


def test_other_refusals(checkpoint: Path) -> None:
    with pytest.raises(AlgorithmError, match=rf"linear\.weight: hidden size {H}, but model 'small' has {H + 1}"):
        side(checkpoint, hidden=H + 1)
    with pytest.raises(AlgorithmError, match="No such file"):
        side(checkpoint.with_name("none.pth"))
    checkpoint.write_text("no checkpoint")
    with pytest.raises(AlgorithmError, match="not a checkpoint"):
        side(checkpoint)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("zipped", [True, False])
def test_a_damaged_file_is_named(checkpoint: Path, zipped: bool) -> None:
    """Cut off or changed anywhere: torch's reader raises much that is no UnpicklingError."""
    state = torch.load(checkpoint, weights_only=True)
    torch.save(state, checkpoint, _use_new_zipfile_serialization=zipped)
    whole, dice, refused = checkpoint.read_bytes(), random.Random(1), 0
    for _ in range(150):
        damaged = bytearray(whole[: dice.randrange(1, 400)] if dice.random() < 0.5 else whole)
        for _ in range(dice.randint(1, 4)):
            damaged[dice.randrange(min(len(damaged), 600))] = dice.randrange(256)
        checkpoint.write_bytes(damaged)
        with suppress(AlgorithmError):
            side(checkpoint)
            continue
        refused += 1
    assert refused > 75


def test_the_peer_goes_back_after_one_token() -> None:
    peer = side(Path("unread.pth"), index=1)
    assert peer.keep_sample
    assert peer.route(rows(peer)).tolist() == [1] * 64


def test_rstitch_asks_its_head_only_where_it_is_unsure(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    built = side(checkpoint, "rstitch", tau=0.4)
    s = side(checkpoint).confidence(rows(built))
    unsure = torch.tensor([n % 4 > 1 for n in range(64)])  # uniform over 3 or 4 of 8: entropy / log V 0.53 and 0.67
    assert built.route(rows(built)).tolist() == (unsure & (s < 0.5)).long().tolist()
    assert built.route(rows(built, threshold=1.5)).tolist() == unsure.long().tolist()
    assert not built.route(rows(built, threshold=s.tolist())).any()
    assert "rstitch: threshold 0.5, not calibrated" in caplog.text
    sidecar(checkpoint)
    assert side(checkpoint, "rstitch", tau=0.4).route(rows(built)).tolist() == (unsure & (s < 0.7)).long().tolist()
    assert side(checkpoint, "rstitch", index=1, tau=0.4).keep_sample
