"""Models that our own decoders do not know, run by transformers' modelling code over our paged KV.

Slower than our own decoders, and without their promise of equal bits in every batch. The rows of a step are one sequence
to transformers; it calls an attention function of ours, which stores K and V in the requests' pages and keeps their rows
apart. Whether that serves a model right is tried on loading.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError

from models.attention import AttentionStep, PagedAttention
from models.batch import Batch, IntArray, StepOutput
from models.config import ModelError, served
from models.quiet import quiet
from models.transformers_config import TransformersConfig, modelling_class, read_configuration
from models.transformers_trial import Trial, UnservedError
from models.weights import IGNORED_SUFFIXES, INDEX, locate, resolve_dtype

_ATTENTION = "trouterd_paged"
"""The name of our attention function among transformers'."""
_HARMLESS = frozenset(
    {
        "dropout",  # 0 outside training
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
"""What modelling code hands to attention functions and ours has no use for."""


class TransformersRunner:
    """ModelRunner over a causal LM of transformers, on any torch device."""

    inline = False

    def __init__(
        self,
        model: Any,
        config: TransformersConfig,
        attention: PagedAttention,
        *,
        num_pages: int,
        context_length: int,
        vocab_size: int,
    ) -> None:
        self._model = model
        self._config = config
        self._attention = attention
        head = model.get_output_embeddings()
        head.register_forward_pre_hook(_pick_rows)
        self.vocab_size = vocab_size
        self.hidden_size: int = head.weight.shape[1]
        self.embedding: torch.Tensor | None = model.get_input_embeddings().weight
        self.context_length = context_length
        self.page_size = attention.page_size
        self.num_pages = num_pages

    @classmethod
    def load(
        cls,
        path: Path | str,
        *,
        device: str = "cpu",
        dtype: str = "float32",
        num_pages: int,
        page_size: int,
        vocab_size: int | None = None,
        context_length: int | None = None,
    ) -> TransformersRunner:
        """Read a Hugging Face directory: config.json and safetensors; no code from there, nothing from a network.

        Arguments and errors are those of `TorchRunner.load`.
        """
        directory = Path(path)
        config = TransformersConfig.load(directory)
        ids, context = served(config, directory, vocab_size, context_length)
        kind, place = resolve_dtype(dtype, config), torch.device(device)
        with quiet(), torch.inference_mode():
            model = _read_model(directory, config, kind).to(place)
            attention = PagedAttention(
                layers=config.num_layers,
                num_pages=num_pages,
                page_size=page_size,
                heads=config.num_heads,
                kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                dtype=kind,
                device=place,
            )
            runner = cls(model, config, attention, num_pages=num_pages, context_length=context, vocab_size=ids)
            try:
                runner._try(kind)
            except UnservedError as error:
                file = directory / "config.json"
                raise ModelError(f"{file}: model_type: {config.family!r} cannot be served: {error}") from error
        return runner

    def _try(self, dtype: torch.dtype) -> None:
        """Leave the model's own attention for ours. Raises UnservedError when that changes what it writes."""
        from transformers import AttentionInterface

        def whole(ids: IntArray) -> torch.Tensor:
            return self._logits(ids, np.arange(len(ids)))

        trial = Trial(whole, self.vocab_size, self.context_length, self.num_pages, self.page_size)
        AttentionInterface.register(_ATTENTION, _attend)
        self._model.set_attn_implementation(_ATTENTION)
        trial.run(lambda batch: self._forward(batch)[0], dtype)

    def allocate_kv(self, num_pages: int) -> None:
        """A KV pool of another size; what the old one held is gone."""
        self._attention.resize(num_pages)
        self.num_pages = num_pages

    def step(self, batch: Batch) -> StepOutput:
        """Feed the rows, write their K and V, return logits and hidden states of the wanted rows."""
        with torch.inference_mode():
            logits, hidden = self._forward(batch)
        return StepOutput(logits=logits[:, : self.vocab_size].float(), hidden=hidden)

    def _forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """[R, rows of the LM head] logits and [R, H] input of the LM head."""
        rows = torch.from_numpy(batch.logit_rows).to(self._attention.device)
        feed = _Feed(self._attention.prepare(batch), self._config, self.context_length, rows)
        token = _feed.set(feed)
        try:
            logits = self._logits(batch.tokens, batch.positions)
        finally:
            _feed.reset(token)
        if feed.layers != list(range(self._config.num_layers)):
            raise UnservedError(
                f"attention runs in layers {feed.layers}, though num_hidden_layers is {self._config.num_layers}"
            )
        if feed.hidden is None:
            raise UnservedError("its LM head is not called")
        return logits, feed.hidden

    def _logits(self, tokens: IntArray, positions: IntArray) -> torch.Tensor:
        device = self._attention.device
        output = self._model(
            input_ids=torch.from_numpy(tokens).to(device)[None],
            position_ids=torch.from_numpy(positions).to(device)[None],
            use_cache=False,
        )
        logits: torch.Tensor = output.logits[0]
        return logits


@dataclass(slots=True)
class _Feed:
    """The step under way, as modelling code meets it."""

    attend: AttentionStep
    config: TransformersConfig
    context_length: int
    logit_rows: torch.Tensor
    """[R]"""
    layers: list[int] = field(default_factory=list)
    """Layers whose attention was called."""
    hidden: torch.Tensor | None = None
    """[R, H] the LM head's input, once it was called."""

    def check(self, tensors: dict[str, torch.Tensor], mask: object, window: int | None, terms: dict[str, Any]) -> None:
        """Raises UnservedError unless plain causal attention over tensors of the expected shapes is what is wanted."""
        config = self.config
        for name, tensor in tensors.items():
            heads = config.num_heads if name == "queries" else config.num_kv_heads
            if tensor.shape[1] != heads or tensor.shape[3] != config.head_dim:
                raise UnservedError(
                    f"its {name} are {tensor.shape[1]} heads of {tensor.shape[3]}, not {heads} of {config.head_dim} as"
                    " its configuration says"
                )
        if mask is not None:
            raise UnservedError("it makes an attention mask of its own")
        if window is not None and window < self.context_length:
            raise UnservedError(f"its attention slides over {window} tokens; lower context_length to that")
        if terms.pop("is_causal", None) is False:
            raise UnservedError("its attention is not causal")
        unknown = sorted(name for name, value in terms.items() if value is not None and name not in _HARMLESS)
        if unknown:
            raise UnservedError(f"its attention takes {', '.join(unknown)}, which paged attention does not know")


_feed: ContextVar[_Feed | None] = ContextVar("feed", default=None)


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **terms: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it: q [1, heads, T, d], k and v [1, kv_heads, T, d] -> [1, T, heads, d]."""
    feed = _feed.get()
    if feed is None:
        raise RuntimeError(f"{_ATTENTION} was called outside of a step")
    feed.check({"queries": query, "keys": key, "values": value}, attention_mask, sliding_window, terms)
    feed.layers.append(module.layer_idx)
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    out = feed.attend(module.layer_idx, q.to(v.dtype), k.to(v.dtype), v, scaling)
    return out.view(1, len(q), -1, feed.config.head_dim), None


def _pick_rows(module: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
    """Before the LM head: only the wanted rows of [1, T, H] go in."""
    del module
    feed = _feed.get()
    if feed is None:
        return None
    feed.hidden = inputs[0][0].index_select(0, feed.logit_rows)
    return (feed.hidden[None],)


def _read_model(directory: Path, config: TransformersConfig, dtype: torch.dtype) -> Any:
    """The model with its own eager attention, every tensor read from the checkpoint. Raises ModelError."""
    files = locate(directory)
    configuration = read_configuration(directory)
    model_class = modelling_class(directory / "config.json", configuration)
    try:
        model, report = model_class.from_pretrained(
            directory,
            config=configuration,
            dtype=dtype,
            attn_implementation="eager",
            local_files_only=True,
            use_safetensors=True,
            weights_only=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # they are in the report, which is clearer than the exception
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ModelError(f"{directory}: transformers cannot load it: {' '.join(str(error).split())}") from error
    places = set(files.values())
    index = places.pop() if len(places) == 1 else directory / INDEX
    if report["mismatched_keys"]:
        name, held, wanted = min(report["mismatched_keys"])
        raise ModelError(f"{index}: tensor {name} has shape {tuple(held)}, config.json asks for {tuple(wanted)}")
    if report["missing_keys"]:
        raise ModelError(f"{index}: tensor {min(report['missing_keys'])} is missing")
    unknown = [name for name in report["unexpected_keys"] if not name.endswith(IGNORED_SUFFIXES)]
    if unknown:
        raise ModelError(f"{index}: tensor {min(unknown)} is not part of a {config.family} model of this shape")
    return model.eval()
