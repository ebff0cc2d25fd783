"""The R2R router against the network as its paper's code lays it out, and files that do not fit."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from algorithms.base import RouteContext, StepResult
from algorithms.r2r_router import KINDS, MODEL_TYPE, save
from algorithms.registry import AlgorithmError, load, validate_params

torch.set_num_threads(1)

V, H, TOP = 40, 16, 10
MODELS = ("small", "large")


class Block(nn.Module):
    """Residual block, dropout left out (evaluation)."""

    def __init__(self, before: int, after: int, expansion: int) -> None:
        super().__init__()
        self.layer_norm = nn.LayerNorm(before)
        wide = before * expansion
        self.mlp = nn.Sequential(nn.Linear(before, wide), nn.GELU(), nn.Dropout(0.1), nn.Linear(wide, after))
        self.dim_change = nn.Linear(before, after) if before != after else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = x if self.dim_change is None else self.dim_change(x)
        return kept + self.mlp(self.layer_norm(x))


class Backbone(nn.Module):
    def __init__(self, widths: tuple[int, ...], expansion: int) -> None:
        super().__init__()
        self.input_projection = nn.Linear(widths[0], widths[0])
        self.blocks = nn.ModuleList(
            Block(a, b, expansion) for a, b in zip(widths, (*widths[1:], widths[-1]), strict=True)
        )
        self.output_layer = nn.Sequential(nn.LayerNorm(widths[-1]), nn.Linear(widths[-1], 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.input_projection(x)
        for block in self.blocks:
            x = block(x)
        return self.output_layer(x)


class Network(nn.Module):
    """The official classifier, layer by layer."""

    def __init__(self, widths: tuple[int, ...], expansion: int, normalize: bool) -> None:
        super().__init__()
        self.logits_projection = nn.Linear(TOP, H)
        self.combined_projection = nn.Linear(3 * H, widths[0])
        self.backbone = Backbone(widths, expansion)
        self.normalize = normalize
        if normalize:
            self.layer_norm_hidden_states = nn.LayerNorm(H)
            self.layer_norm_token = nn.LayerNorm(H)

    def forward(self, hidden: torch.Tensor, token: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        if self.normalize:
            hidden, token = self.layer_norm_hidden_states(hidden), self.layer_norm_token(token)
            logits = logits.softmax(-1)
        both = torch.cat((hidden, token, self.logits_projection(logits)), -1)
        return self.backbone(self.combined_projection(both)).squeeze(-1)


class Subset(nn.Module):
    """The official classifiers of fewer inputs, by their names."""

    def __init__(self, model_type: str, width: int, normalize: bool) -> None:
        super().__init__()
        self.model_type, self.normalize = model_type, normalize
        match model_type:
            case "LogitsClassifier":
                self.logits_projection = nn.Linear(TOP, width)
            case "HiddenStatesClassifier":
                self.hidden_states_projection = nn.Linear(H, width)
                if normalize:
                    self.layer_norm = nn.LayerNorm(H)
            case "HiddenStatesLogitsClassifier":
                self.logits_projection = nn.Linear(TOP, H)
                self.combined_projection = nn.Linear(2 * H, width)
            case "HiddenStatesTokenLMHeadClassifier":
                self.combined_projection = nn.Linear(2 * H, width)
                if normalize:
                    self.layer_norm_token = nn.LayerNorm(H)
        if normalize and hasattr(self, "combined_projection"):
            self.layer_norm_hidden_states = nn.LayerNorm(H)
        self.backbone = Backbone((width, width), 4)

    def forward(self, hidden: torch.Tensor, token: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        if self.normalize:
            logits = logits.softmax(-1)
            for name in ("layer_norm", "layer_norm_hidden_states"):
                hidden = getattr(self, name)(hidden) if hasattr(self, name) else hidden
            token = self.layer_norm_token(token) if hasattr(self, "layer_norm_token") else token
        match self.model_type:
            case "LogitsClassifier":
                x = self.logits_projection(logits)
            case "HiddenStatesClassifier":
                x = self.hidden_states_projection(hidden)
            case "HiddenStatesLogitsClassifier":
                x = self.combined_projection(torch.cat((hidden, self.logits_projection(logits)), -1))
            case _:
                x = self.combined_projection(torch.cat((hidden, token), -1))
        return self.backbone(x).squeeze(-1)


SUBSETS = sorted(set(KINDS) - {MODEL_TYPE})


def network(widths: tuple[int, ...] = (24, 24, 24), expansion: int = 4, normalize: bool = False) -> Network:
    torch.manual_seed(3)
    net = Network(widths, expansion, normalize).eval()
    return randomised(net)


def randomised(net: Any) -> Any:
    """Weights with which probabilities spread."""
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.3)
    nn.init.normal_(net.backbone.output_layer[1].weight, std=3.0)
    nn.init.zeros_(net.backbone.output_layer[0].bias)
    return net


def init_args(net: Network, **changes: Any) -> dict[str, Any]:
    widths = [block.layer_norm.weight.numel() for block in net.backbone.blocks]
    args: dict[str, Any] = {
        "hidden_states_size": H,
        "logits_size": TOP,
        "hidden_dims": widths,
        "expansion_factor": net.backbone.blocks[0].mlp[0].out_features // widths[0],
        "dropout_rate": 0.1,
        "use_position_embedding": False,
        "freeze_lm_head": True,
        "normalize_input": net.normalize,
        "pretrained_model_name": "small",
    }
    return args | changes


def write(folder: Path, net: Network, threshold: float = 0.4, **changes: Any) -> Path:
    path = folder / "router.pt"
    save(path, net.state_dict(), init_args(net, **changes), threshold)
    return path


def entry(checkpoint: Path, embedding: torch.Tensor | None, **params: Any) -> Any:
    definition = load("r2r")
    context = RouteContext(MODELS, 0, V, H, torch.device("cpu"), embedding)
    return definition.sides(0)(context, validate_params(definition, {"checkpoint": str(checkpoint), **params}, MODELS))


def rows(threshold: float | list[float], count: int = 64) -> StepResult:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(count, V, generator=generator) * 3
    return StepResult(
        logits=logits,
        hidden=torch.randn(count, H, generator=generator),
        tokens=logits.argmax(-1),
        index=torch.arange(count),
        seed=torch.zeros(count, dtype=torch.int64),
        choice=torch.zeros(count, dtype=torch.int64),
        params={"threshold": torch.tensor(threshold).expand(count).clone()},
        state=[{} for _ in range(count)],
    )


@pytest.fixture
def embedding() -> torch.Tensor:
    return torch.randn(V + 3, H, generator=torch.Generator().manual_seed(9))


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("widths", "expansion"), [((24, 24, 24), 4), ((24, 32, 16), 2)])
def test_equals_the_unfolded_network(
    tmp_path: Path, embedding: torch.Tensor, widths: tuple[int, ...], expansion: int, normalize: bool
) -> None:
    net = network(widths, expansion, normalize)
    step = rows(0.5)
    got = entry(write(tmp_path, net), embedding).probabilities(step)
    with torch.no_grad():
        top = step.logits.sort(-1, descending=True).values[:, :TOP]
        wanted = net(step.hidden, embedding[step.tokens], top).sigmoid()
    assert wanted.std() > 0.1
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("model_type", SUBSETS)
def test_routers_of_fewer_inputs(tmp_path: Path, embedding: torch.Tensor, model_type: str, normalize: bool) -> None:
    torch.manual_seed(4)
    net = randomised(Subset(model_type, 24, normalize).eval())
    # Constructor arguments of inputs that a class lacks are not in its file.
    args: dict[str, Any] = {"hidden_dims": [24, 24], "expansion_factor": 4, "normalize_input": normalize}
    args |= {"hidden_states_size": H} if "Hidden" in model_type else {}
    args |= {"logits_size": TOP} if "Logits" in model_type else {}
    save(tmp_path / "router.pt", net.state_dict(), args, 0.5, model_type)
    step = rows(-1.0)
    built = entry(tmp_path / "router.pt", embedding if "Token" in model_type else None)
    with torch.no_grad():
        top = step.logits.sort(-1, descending=True).values[:, :TOP]
        wanted = net(step.hidden, embedding[step.tokens], top)
    assert wanted.std() > 0.1
    probabilities = built.probabilities(step)
    torch.testing.assert_close(probabilities, wanted.sigmoid(), atol=1e-5, rtol=1e-5)
    median = float(probabilities.median())
    assert built.route(rows(median)).tolist() == (probabilities >= median).long().tolist()
    if "Token" in model_type:
        with pytest.raises(AlgorithmError, match="its embedding is an input"):
            entry(tmp_path / "router.pt", None)


def test_the_log_says_whose_threshold_it_is(
    tmp_path: Path, embedding: torch.Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path = write(tmp_path, network(), threshold=0.4)
    entry(path, embedding)
    assert caplog.messages[-1].startswith(f"r2r: threshold 0.4, calibrated in {path}; the official server takes 0.5")
    entry(path, embedding, threshold=0.6)
    assert caplog.messages[-1] == "r2r: threshold 0.6, as configured"


def test_threshold_is_the_rows_own_or_the_calibrated_one_and_counts_at_equality(
    tmp_path: Path, embedding: torch.Tensor
) -> None:
    side = entry(write(tmp_path, network(), threshold=0.4), embedding)
    p = side.probabilities(rows(0.5))
    calibrated = side.route(rows(-1.0))
    assert calibrated.tolist() == (p >= 0.4).long().tolist()
    assert 0 < calibrated.sum() < len(p)
    assert side.route(rows(p.tolist())).all()
    assert not side.route(rows(torch.nextafter(p, torch.tensor(2.0)).tolist())).any()
    assert side.route(rows(0.0)).all()
    assert not side.route(rows(1.5)).any()


def test_bfloat16_is_close(tmp_path: Path, embedding: torch.Tensor) -> None:
    path = write(tmp_path, network())
    step = rows(0.5)
    exact = entry(path, embedding).probabilities(step)
    close = entry(path, embedding, dtype="bfloat16").probabilities(step)
    torch.testing.assert_close(close, exact, atol=0.1, rtol=0)
    assert not torch.equal(close, exact)


def test_the_peer_goes_back_after_one_token(embedding: torch.Tensor) -> None:
    definition = load("r2r")
    context = RouteContext(MODELS, 1, V, H, torch.device("cpu"), embedding)
    peer = definition.sides(1)(context, validate_params(definition, {"checkpoint": "unread.pt"}, MODELS))
    assert peer.keep_sample
    assert peer.route(rows(0.5)).tolist() == [1] * 64


class Code:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("code ran",)


def _change(part: str, **values: Any) -> Callable[[dict[str, Any]], object]:
    def apply(content: dict[str, Any]) -> object:
        content[part].update({name.replace("__", "."): value for name, value in values.items()})
        return content

    return apply


def _drop(part: str, name: str) -> Callable[[dict[str, Any]], object]:
    def apply(content: dict[str, Any]) -> object:
        del content[part][name]
        return content

    return apply


BREAKAGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "kind": lambda content: content | {"model_type": "SomethingElse"},
    "args": _drop("init_args", "hidden_dims"),
    "position": _change("init_args", use_position_embedding=True),
    "hidden": _change("init_args", hidden_states_size=H * 2),
    "missing": _drop("state_dict", "backbone.blocks.1.mlp.3.bias"),
    "shape": _change("state_dict", combined_projection__weight=torch.zeros(24, 3 * H + 1)),
    "unknown": _change("state_dict", backbone__extra__weight=torch.zeros(1)),
    "top": _change("init_args", logits_size=V + 1),
    "list": lambda content: list(content),
    "code": lambda content: content | {"common_args": Code()},
}


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("kind", "model_type: 'SomethingElse'"),
        ("args", "init_args.hidden_dims: missing"),
        ("position", "init_args.use_position_embedding: not supported"),
        ("hidden", f"init_args.hidden_states_size: {2 * H}, but model 'small' has {H}"),
        ("missing", "backbone.blocks.1.mlp.3.bias: missing"),
        ("shape", "combined_projection.weight: has shape"),
        ("unknown", "backbone.extra.weight: unknown tensor"),
        ("top", f"init_args.logits_size: {V + 1}, but the vocabulary has {V}"),
        ("list", "must hold a dict"),
        ("code", "code is never run"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(
    tmp_path: Path, embedding: torch.Tensor, how: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, network())
    torch.save(BREAKAGES[how](torch.load(path, weights_only=True)), path)
    with pytest.raises(AlgorithmError, match=re.escape(message)) as failure:
        entry(path, embedding)
    assert str(path) in str(failure.value)
    assert "code ran" not in capsys.readouterr().out


def test_other_refusals(tmp_path: Path, embedding: torch.Tensor) -> None:
    path = write(tmp_path, network())
    with pytest.raises(AlgorithmError, match="its embedding is an input"):
        entry(path, None)
    with pytest.raises(AlgorithmError, match="No such file"):
        entry(tmp_path / "none.pt", embedding)
    (tmp_path / "text.pt").write_text("no checkpoint")
    with pytest.raises(AlgorithmError, match=r"text\.pt: not a checkpoint"):
        entry(tmp_path / "text.pt", embedding)
    content = torch.load(path, weights_only=True)
    del content["common_args"]["threshold"]
    torch.save(content, path)
    with pytest.raises(AlgorithmError, match="carries no calibrated one"):
        entry(path, embedding)
    assert entry(path, embedding, threshold=0.3) is not None


def test_the_twin_file_with_embeddings_loads_too(tmp_path: Path, embedding: torch.Tensor) -> None:
    net = network()
    path = tmp_path / "router_all.pt"
    save(path, {**net.state_dict(), "token_embeddings.weight": torch.zeros(V, H)}, init_args(net), 0.4)
    step = rows(0.5)
    torch.testing.assert_close(
        entry(path, embedding).probabilities(step), entry(write(tmp_path, net), embedding).probabilities(step)
    )
