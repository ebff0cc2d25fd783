"""The neural router of R2R (arXiv 2505.21600): hidden state, token embedding and top logits in, a logit of divergence out.

With h the LM head's input, e the embedding of the sampled token and l the largest raw logits, sorted:
    x = W_in W_c [h; e; W_l l]      (three linear maps without activation between them: folded into one at load time)
    x = x + W_2 gelu(W_1 LayerNorm(x))      (once per block)
    logit = w LayerNorm(x)
That is the published kind. The official code knows smaller ones, which lack some of the inputs (see `KINDS`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from algorithms.checkpoint import Tensors, load_mapping
from algorithms.registry import AlgorithmError
from models.cuda.router_head import HeadBlock, RouterHead, RouterInputs, make_head


@dataclass(frozen=True, slots=True)
class Kind:
    """A class of the official code: its inputs, and what it calls the parameters ahead of its blocks."""

    hidden: bool
    token: bool
    logits: bool
    single: str = ""
    """The map of its only input; those of several inputs have a combined_projection, and map the logits to H values first."""
    hidden_norm: str = "layer_norm_hidden_states"


MODEL_TYPE = "HiddenStatesTokenLMHeadLogitsClassifier"
"""The published kind."""
KINDS = {
    MODEL_TYPE: Kind(hidden=True, token=True, logits=True),
    "HiddenStatesTokenLMHeadClassifier": Kind(hidden=True, token=True, logits=False),
    "HiddenStatesLogitsClassifier": Kind(hidden=True, token=False, logits=True),
    "HiddenStatesClassifier": Kind(
        hidden=True, token=False, logits=False, single="hidden_states_projection", hidden_norm="layer_norm"
    ),
    "LogitsClassifier": Kind(hidden=False, token=False, logits=True, single="logits_projection"),
}
_EPS = 1e-5
_UNSUPPORTED = ("use_position_embedding",)
_EMBEDDING = "token_embeddings.weight"
"""In the twin files that carry the small model's embedding along; the running model's own is used."""

Affine = tuple[torch.Tensor, torch.Tensor]
"""Weight [out, in] (or [width] of a norm) and bias."""


@dataclass(frozen=True, slots=True)
class _Block:
    norm: Affine
    widen: Affine
    narrow: Affine
    change: Affine | None


class R2RRouter:
    """The router on a device, in one floating type."""

    def __init__(
        self,
        combined: Affine,
        blocks: list[_Block],
        out_norm: Affine,
        out: Affine,
        norms: tuple[Affine | None, Affine | None] | None,
        kind: Kind,
        inputs: RouterInputs,
    ) -> None:
        self.kind = kind
        self._combined = combined
        self._blocks = blocks
        self._out_norm = out_norm
        self._out = out
        self._norms = norms
        """LayerNorms of hidden state and embedding, where they are inputs, if the checkpoint normalises its inputs."""
        self.head: RouterHead | None = None
        """The same network as kernels of its own, from the logits to the decision; None where it does not fit them."""
        if kind == KINDS[MODEL_TYPE] and norms is None and all(block.change is None for block in blocks):
            plain = [HeadBlock(block.norm, block.widen, block.narrow) for block in blocks]
            self.head = make_head(combined, plain, out_norm, out, inputs, _EPS)

    def __call__(self, hidden: torch.Tensor, embedded: torch.Tensor | None, top: torch.Tensor | None) -> torch.Tensor:
        """[R] float32 logits of "the models diverge here".

        Args:
            hidden: [R, H] the LM head's input.
            embedded: [R, E] embeddings of the sampled tokens, where the kind has them as an input.
            top: [R, K] float32 the largest raw logits, falling, where the kind has them as an input.
        """
        dtype = self._combined[0].dtype
        inputs = []
        for part, norm in zip(
            (hidden if self.kind.hidden else None, embedded), self._norms or (None, None), strict=True
        ):
            if part is not None:
                inputs.append(part.to(dtype) if norm is None else _layer_norm(part.to(dtype), norm))
        if top is not None:
            inputs.append((top.float() if self._norms is None else top.float().softmax(dim=-1)).to(dtype))
        x = _linear(torch.cat(inputs, dim=-1), self._combined)
        for block in self._blocks:
            wide = functional.gelu(_linear(_layer_norm(x, block.norm), block.widen))
            kept = x if block.change is None else _linear(x, block.change)
            x = kept + _linear(wide, block.narrow)
        return _linear(_layer_norm(x, self._out_norm), self._out).squeeze(-1).float()


@dataclass(frozen=True, slots=True)
class RouterFile:
    """A checkpoint in the official format, parsed: sizes, calibrated threshold, tensors."""

    path: Path
    key: str
    kind: Kind
    hidden_size: int
    """0 where the hidden state is no input."""
    top: int
    """How many of the largest logits, 0 where they are no input."""
    widths: tuple[int, ...]
    expansion: int
    normalize: bool
    threshold: float | None
    """The calibrated one; None if the file has none."""
    state: object

    @classmethod
    def load(cls, path: Path, key: str) -> RouterFile:
        """Parse a file. Raises AlgorithmError naming file and field."""
        content = load_mapping(path, key)

        def error(problem: str) -> AlgorithmError:
            return AlgorithmError(f"{key}: {path}: {problem}", key)

        model_type = content.get("model_type")
        kind = {name.lower(): kind for name, kind in KINDS.items()}.get(str(model_type).lower())
        if kind is None:
            raise error(f"model_type: {model_type!r}; supported are {', '.join(KINDS)}")
        args = content.get("init_args")
        if not isinstance(args, dict):
            raise error("init_args: missing")
        for name in _UNSUPPORTED:
            if args.get(name):
                raise error(f"init_args.{name}: not supported")
        try:
            widths = tuple(int(width) for width in args["hidden_dims"])
            common = content.get("common_args") or {}
            threshold = common.get("threshold")
            parsed = cls(
                path=path,
                key=key,
                kind=kind,
                hidden_size=int(args["hidden_states_size"]) if kind.hidden else 0,
                top=int(args.get("logits_size", 100)) if kind.logits else 0,
                widths=widths,
                expansion=int(args.get("expansion_factor", 4)),
                normalize=bool(args.get("normalize_input", False)),
                threshold=None if threshold is None else float(threshold),
                state=content.get("state_dict"),
            )
        except KeyError as missing:
            raise error(f"init_args.{missing.args[0]}: missing") from missing
        except (TypeError, ValueError, AttributeError) as wrong:
            raise error(f"init_args or common_args: {wrong}") from wrong
        sizes = [*widths, parsed.expansion, *[parsed.hidden_size] * kind.hidden, *[parsed.top] * kind.logits]
        if not widths or min(sizes) < 1:
            raise error("init_args: sizes must be positive, hidden_dims not empty")
        return parsed

    def build(self, embedding_size: int, device: torch.device, dtype: torch.dtype) -> R2RRouter:
        """The network; `embedding_size` is 0 where the token is no input. Raises AlgorithmError naming file and tensor."""
        tensors = Tensors(self.path, self.key, self.state)

        def linear(name: str, outputs: int, inputs: int) -> Affine:
            return tensors.take(f"{name}.weight", outputs, inputs), tensors.take(f"{name}.bias", outputs)

        def norm(name: str, width: int) -> Affine:
            return tensors.take(f"{name}.weight", width), tensors.take(f"{name}.bias", width)

        def placed(pair: Affine) -> Affine:
            return pair[0].to(device, dtype), pair[1].to(device, dtype)

        kind, hidden, width = self.kind, self.hidden_size, self.widths[0]
        if kind.single:
            combined = linear(kind.single, width, hidden + self.top)
        else:
            inputs = hidden + embedding_size + hidden * kind.logits
            combined = linear("combined_projection", width, inputs)
        if kind.logits and not kind.single:
            combined = _folded(linear("logits_projection", hidden, self.top), combined)
        combined = _composed(combined, linear("backbone.input_projection", width, width))
        blocks = []
        for index, (before, after) in enumerate(zip(self.widths, (*self.widths[1:], self.widths[-1]), strict=True)):
            name = f"backbone.blocks.{index}"
            wide = before * self.expansion
            blocks.append(
                _Block(
                    norm=placed(norm(f"{name}.layer_norm", before)),
                    widen=placed(linear(f"{name}.mlp.0", wide, before)),
                    narrow=placed(linear(f"{name}.mlp.3", after, wide)),
                    change=placed(linear(f"{name}.dim_change", after, before)) if before != after else None,
                )
            )
        last = self.widths[-1]
        out_norm, out = norm("backbone.output_layer.0", last), linear("backbone.output_layer.1", 1, last)
        norms = None
        if self.normalize:
            norms = (
                placed(norm(kind.hidden_norm, hidden)) if kind.hidden else None,
                placed(norm("layer_norm_token", embedding_size)) if kind.token else None,
            )
        tensors.finish(ignored=(_EMBEDDING,))
        sizes = RouterInputs(hidden=hidden, embedding=embedding_size, top=self.top)
        return R2RRouter(placed(combined), blocks, placed(out_norm), placed(out), norms, kind, sizes)


def save(
    path: Path,
    state: dict[str, torch.Tensor],
    init_args: dict[str, Any],
    threshold: float,
    model_type: str = MODEL_TYPE,
) -> None:
    """Write a checkpoint in the official format; `model_type` is one of `KINDS`."""
    kind = KINDS[model_type]
    uses = {"hidden_states": kind.hidden, "token": kind.token, "logits": kind.logits}
    content = {
        "model_type": model_type,
        "init_args": init_args,
        "common_args": {"threshold": threshold, "input_type": [name for name, used in uses.items() if used]},
        "model_specific_args": {},
        "state_dict": state,
    }
    torch.save(content, path)


def _folded(logits: Affine, combine: Affine) -> Affine:
    """One map of [h; e; l] for W_c [h; e; W_l l + b_l] + b_c, multiplied out in float64."""
    split = combine[0].shape[1] - logits[0].shape[0]
    weight = torch.cat((combine[0][:, :split], combine[0][:, split:] @ logits[0]), dim=1)
    return weight, combine[0][:, split:] @ logits[1] + combine[1]


def _composed(first: Affine, then: Affine) -> Affine:
    """One map for two."""
    return then[0] @ first[0], then[0] @ first[1] + then[1]


def _linear(x: torch.Tensor, pair: Affine) -> torch.Tensor:
    return functional.linear(x, pair[0], pair[1])


def _layer_norm(x: torch.Tensor, pair: Affine) -> torch.Tensor:
    return functional.layer_norm(x, x.shape[-1:], pair[0], pair[1], _EPS)
