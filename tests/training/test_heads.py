"""What trainers write is what routes read: key by key, and value by value."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

from algorithms.base import RouteContext
from algorithms.confidence_head import ConfidenceHead as RouteConfidence
from algorithms.defer_head import DeferHead
from algorithms.r2r_router import RouterFile
from trouterd.training.collm import CollmHead, DeferralRow
from trouterd.training.confidence import ConfidenceHead, ConfidenceNetwork
from trouterd.training.fit import Schedule, fit
from trouterd.training.options import PairOptions, TrainOptions
from trouterd.training.r2r import R2RHead
from trouterd.training.scaling import Standard

torch.set_num_threads(1)
HIDDEN, TOP, VOCABULARY, ROWS = 12, 20, 30, 64
OPTIONS = TrainOptions(algorithm="r2r", output=Path("x"), pair=PairOptions(prompts="demo"), width=16, blocks=3)


def rows() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "hidden": torch.randn(ROWS, HIDDEN) * torch.linspace(0.1, 30, HIDDEN) + 5,
        "token": torch.randint(VOCABULARY, (ROWS,)),
        "top": torch.randn(ROWS, TOP).sort(descending=True).values * 10,
    }


def context() -> RouteContext:
    return RouteContext(("small", "large"), 0, VOCABULARY, HIDDEN, torch.device("cpu"))


def test_r2r_in_the_official_format(tmp_path: Path) -> None:
    tensors, embedding = rows(), torch.randn(VOCABULARY, HIDDEN) * 3
    head = R2RHead(embedding, tensors, torch.arange(ROWS), OPTIONS)
    torch.nn.init.normal_(head.network.combined_projection.bias)
    head.network.eval()
    head.save(tmp_path / "r.pt", 0.25, "some/model")
    content = torch.load(tmp_path / "r.pt", weights_only=True)
    assert content.keys() == {"model_type", "init_args", "common_args", "model_specific_args", "state_dict"}
    assert content["common_args"] == {"threshold": 0.25, "input_type": ["hidden_states", "token", "logits"]}
    assert content["init_args"]["hidden_dims"] == [16, 16, 16]
    assert content["init_args"]["pretrained_model_name"] == "some/model"
    linears = ["logits_projection", "combined_projection", "backbone.input_projection"]
    linears += [f"backbone.output_layer.{part}" for part in (0, 1)]
    linears += [f"backbone.blocks.{b}.{part}" for b in range(3) for part in ("layer_norm", "mlp.0", "mlp.3")]
    assert content["state_dict"].keys() == {f"{name}.{part}" for name in linears for part in ("weight", "bias")}
    router = RouterFile.load(tmp_path / "r.pt", "checkpoint").build(HIDDEN, torch.device("cpu"), torch.float32)
    expected = router(tensors["hidden"], embedding[tensors["token"]], tensors["top"])
    torch.testing.assert_close(head.values(tensors), expected.sigmoid(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("once", [False, True])
def test_citer_in_the_official_format(tmp_path: Path, once: bool) -> None:
    tensors = rows()
    network = ConfidenceNetwork(Standard(tensors["hidden"]))
    network.train()
    for _ in range(3):
        network(tensors["hidden"])  # moves the running statistics
    network.eval()
    head = ConfidenceHead(network, once=once)
    head.save(tmp_path / "c.pth", 0.5, "m")
    state = torch.load(tmp_path / "c.pth", weights_only=True)
    statistics = ("running_mean", "running_var", "num_batches_tracked")
    names = {f"{name}.{part}" for name in ("mlp.0", "mlp.1", "mlp.4", "linear") for part in ("weight", "bias")}
    assert state.keys() == names | {f"mlp.1.{part}" for part in statistics}
    assert state["linear.weight"].shape == (1, HIDDEN)
    confidence = RouteConfidence.load(tmp_path / "c.pth", "checkpoint", context())(tensors["hidden"])
    expected = 1 - confidence if once else confidence
    torch.testing.assert_close(head.values(tensors), expected, rtol=1e-4, atol=1e-5)


def test_collm_as_safetensors(tmp_path: Path) -> None:
    tensors = rows()
    network = DeferralRow(Standard(tensors["hidden"]))
    torch.nn.init.normal_(network.row.weight)
    head = CollmHead(network)
    head.save(tmp_path / "d.safetensors", 0.5, "m")
    state = load_file(tmp_path / "d.safetensors")
    assert {name: tuple(value.shape) for name, value in state.items()} == {
        "defer.weight": (1, HIDDEN),
        "defer.bias": (1,),
    }
    expected = DeferHead.load(tmp_path / "d.safetensors", "checkpoint", context())(tensors["hidden"])
    torch.testing.assert_close(head.values(tensors), expected, rtol=1e-4, atol=1e-5)


def test_the_best_epoch_is_kept_not_the_last() -> None:
    """Training rows and validation rows disagree, so that learning more makes it worse after a while."""
    torch.manual_seed(3)
    inputs = torch.randn(40, 20)
    target = (inputs[:, 0] > 0).float()
    target[:20] = torch.where(torch.rand(20) < 0.35, 1 - target[:20], target[:20])

    def run(epochs: int) -> tuple[torch.Tensor, int, float]:
        torch.manual_seed(0)
        head = torch.nn.Linear(20, 1)

        def loss(chosen: torch.Tensor) -> torch.Tensor:
            return functional.binary_cross_entropy_with_logits(head(inputs[chosen]).squeeze(-1), target[chosen])

        schedule = Schedule(epochs, 5, 0.05, 0.0, patience=1000, seed=1)
        losses: list[float] = []
        result = fit(
            head, loss, torch.arange(20), torch.arange(20, 40), schedule, lambda _, value: losses.append(value)
        )
        assert result.validation_loss == min(losses) < losses[-1]
        assert result.best_epoch == losses.index(min(losses)) + 1
        assert loss(torch.arange(20, 40)).item() == pytest.approx(min(losses))
        return head.weight.detach(), result.best_epoch, result.validation_loss

    one, other = run(60), run(60)
    assert torch.equal(one[0], other[0])
    assert one[1:] == other[1:]
