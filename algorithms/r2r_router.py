"""The neural router of R2R (arXiv 2505.21600): hidden state, token embedding and top logits in, a logit of divergence out.

With h the LM head's input, e the embedding of the sampled token and l the largest raw logits, sorted:
    x = W_in W_c [h; e; W_l l]      (three linear maps without activation between them: folded into one at load time)
    x = x + W_2 gelu(W_1 LayerNorm(x))      (once per block)
    logit = w LayerNorm(x)
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

MODEL_TYPE = "HiddenStatesTokenLMHeadLogitsClassifier"
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
        norms: tuple[Affine, Affine] | None,
        inputs: RouterInputs,
    ) -> None:
        self._combined = combined
        self._blocks = blocks
        self._out_norm = out_norm
        self._out = out
        self._norms = norms
        """LayerNorms of hidden state and embedding, if the checkpoint normalises its inputs."""
        self.head: RouterHead | None = None
        """The same network as kernels of its own, from the logits to the decision; None where it does not fit them."""
        if norms is None and all(block.change is None for block in blocks):
            plain = [HeadBlock(block.norm, block.widen, block.narrow) for block in blocks]
            self.head = make_head(combined, plain, out_norm, out, inputs, _EPS)

    def __call__(self, hidden: torch.Tensor, embedded: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
        """[R] float32 logits of "the models diverge here".

        Args:
            hidden: [R, H] the LM head's input.
            embedded: [R, E] embeddings of the sampled tokens.
            top: [R, K] float32 the largest raw logits, falling.
        """
        dtype = self._combined[0].dtype
        hidden, embedded, top = hidden.to(dtype), embedded.to(dtype), top.float()
        if self._norms is not None:
            hidden = _layer_norm(hidden, self._norms[0])
            embedded = _layer_norm(embedded, self._norms[1])
            top = top.softmax(dim=-1)
        x = _linear(torch.cat((hidden, embedded, top.to(dtype)), dim=-1), self._combined)
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
    hidden_size: int
    top: int
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

        kind = content.get("model_type")
        if str(kind).lower() != MODEL_TYPE.lower():
            raise error(f"model_type: {kind!r}; {MODEL_TYPE} is supported")
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
                hidden_size=int(args["hidden_states_size"]),
                top=int(args.get("logits_size", 100)),
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
        if not widths or min(*widths, parsed.hidden_size, parsed.top, parsed.expansion) < 1:
            raise error("init_args: sizes must be positive, hidden_dims not empty")
        return parsed

    def build(self, embedding_size: int, device: torch.device, dtype: torch.dtype) -> R2RRouter:
        """The network. Raises AlgorithmError naming file and tensor."""
        tensors = Tensors(self.path, self.key, self.state)

        def linear(name: str, outputs: int, inputs: int) -> Affine:
            return tensors.take(f"{name}.weight", outputs, inputs), tensors.take(f"{name}.bias", outputs)

        def norm(name: str, width: int) -> Affine:
            return tensors.take(f"{name}.weight", width), tensors.take(f"{name}.bias", width)

        def placed(pair: Affine) -> Affine:
            return pair[0].to(device, dtype), pair[1].to(device, dtype)

        hidden, width = self.hidden_size, self.widths[0]
        inputs = 2 * hidden + embedding_size
        combine = linear("combined_projection", width, inputs)
        combined = _folded(
            linear("logits_projection", hidden, self.top), combine, linear("backbone.input_projection", width, width)
        )
        blocks = []
        for index, (before, after) in enumerate(zip((width, *self.widths), self.widths, strict=False)):
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
                placed(norm("layer_norm_hidden_states", hidden)),
                placed(norm("layer_norm_token", embedding_size)),
            )
        tensors.finish(ignored=(_EMBEDDING,))
        sizes = RouterInputs(hidden=hidden, embedding=embedding_size, top=self.top)
        return R2RRouter(placed(combined), blocks, placed(out_norm), placed(out), norms, sizes)


def save(path: Path, state: dict[str, torch.Tensor], init_args: dict[str, Any], threshold: float) -> None:
    """Write a checkpoint in the official format."""
    content = {
        "model_type": MODEL_TYPE,
        "init_args": init_args,
        "common_args": {"threshold": threshold, "input_type": ["hidden_states", "token", "logits"]},
        "model_specific_args": {},
        "state_dict": state,
    }
    torch.save(content, path)


def _folded(logits: Affine, combine: Affine, into: Affine) -> Affine:
    """One map of [h; e; l] for W_in (W_c [h; e; W_l l + b_l] + b_c) + b_in, multiplied out in float64."""
    split = combine[0].shape[1] - logits[0].shape[0]
    weight = torch.cat((combine[0][:, :split], combine[0][:, split:] @ logits[0]), dim=1)
    bias = combine[0][:, split:] @ logits[1] + combine[1]
    return into[0] @ weight, into[0] @ bias + into[1]


def _linear(x: torch.Tensor, pair: Affine) -> torch.Tensor:
    return functional.linear(x, pair[0], pair[1])


def _layer_norm(x: torch.Tensor, pair: Affine) -> torch.Tensor:
    return functional.layer_norm(x, x.shape[-1:], pair[0], pair[1], _EPS)
