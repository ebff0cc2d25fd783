"""The dense decoder of the Llama, Qwen2 and Qwen3 families on a CUDA device: cuBLAS products, Triton kernels between them.

Every kernel reads rows, lengths and pages on the device, so that a step of T rows can be captured in a CUDA graph, whatever
mix of decode, extend and prefill the rows are. Activations are rounded where `models.decoder` rounds them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from models.batch import StepOutput
from models.config import ModelConfig, ModelError, served
from models.cuda.decoder_weights import DecoderWeights, LayerWeights, MatrixKind, TensorSource, load_weights
from models.cuda.dummy import DummyWeights
from models.cuda.heads import HeadShape
from models.cuda.ragged_prefill import RaggedPrefill, flashinfer_present
from models.cuda.shard import FusedSums, Shard
from models.cuda.support import check_device, check_model
from models.cuda.tiles import LEAST_ROWS, SMALL_ROWS, TileShape, choose_tiles
from models.rope import rotary_table
from models.rows import Rows, Runs
from models.weights import Checkpoint, resolve_dtype

LOAD_FORMATS = ("safetensors", "dummy")
RAGGED_ROWS = 64
RAGGED_KEYS = 4096
"""FlashInfer's prefill pays its plan where a run has so many rows and a context so many keys; below, ours is as fast."""

Attend = Callable[[int, torch.Tensor, torch.Tensor], None]
"""(layer, qkv, out): attention of all rows."""


class FastPath(Protocol):
    """Another way through the whole model, for small steps."""

    def takes(self, rows: Rows) -> bool:
        """Whether it can run this step; depends on the shapes alone."""
        ...

    def skips(self, rows: int) -> bool:
        """See `Skipper`."""
        ...

    def forward(self, rows: Rows) -> StepOutput:
        """As `CudaDecoder.forward`."""
        ...


@dataclass(slots=True)
class _Buffers:
    """Activations of one step; every layer uses the same ones."""

    x: torch.Tensor
    """[T, H] the residual stream."""
    normed: torch.Tensor
    qkv: torch.Tensor
    attended: torch.Tensor
    """[max(T, LEAST_ROWS), heads * head_dim]; rows that are no active ones stay 0, so that whatever comes of them is finite."""
    deltas: tuple[torch.Tensor, torch.Tensor]
    """[max(T, LEAST_ROWS), H] what attention and what the MLP add to `x`."""
    gate_up: torch.Tensor
    act: torch.Tensor


class CudaDecoder:
    """A `RowDecoder`; make it with `load`, then give it pages with `allocate_kv`.

    Weights, K and V are allocated one after the other, so that a caller can measure what is left between them.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        shard: Shard,
        *,
        dtype: torch.dtype,
        page_size: int,
        vocab_size: int,
        context_length: int,
    ) -> None:
        self.config = config
        self.weights = weights
        self.shard = shard
        self.embedding = weights.embedding
        self.device = weights.embedding.device
        self.dtype = dtype
        self.vocab_size = vocab_size
        self.context_length = context_length
        self.page_size = page_size
        self.num_pages = 0
        self.shape = HeadShape(
            heads=config.num_heads // shard.world,
            kv_heads=config.num_kv_heads // shard.world,
            head_dim=config.head_dim,
            page_size=page_size,
            eps=config.rms_norm_eps,
        )
        self.k_cache = weights.embedding.new_zeros(0)
        self.v_cache = weights.embedding.new_zeros(0)
        """Both [layers, num_pages + 1, kv_heads, page_size, head_dim]; the last page belongs to nobody."""
        self.rotations = _half_rotations(config, context_length, self.device)
        """[context_length, 2, head_dim / 2] float32 cos and sin."""
        self.ragged_prefill = flashinfer_present()
        """Long runs may take FlashInfer's kernel; False leaves them to the kernel of all others."""
        self.overlap = False
        """Start a small kernel while the product ahead of it ends; needs compute capability 9.0."""
        self.fast_path: FastPath | None = None
        self._ragged: RaggedPrefill | None = None
        self.processors = _processors(self.device)
        """Multiprocessors that this process may use at once, which MPS may limit."""

    @classmethod
    def load(
        cls,
        path: Path | str,
        *,
        device: str | torch.device = "cuda",
        dtype: str = "auto",
        load_format: str = "safetensors",
        page_size: int = 16,
        vocab_size: int | None = None,
        context_length: int | None = None,
        shard: Shard | None = None,
    ) -> CudaDecoder:
        """Read a Hugging Face directory.

        Args:
            path: directory with config.json and, unless the weights are dummies, safetensors files.
            device: the CUDA device.
            dtype: "float32", "bfloat16" or "auto". float32 is exact: no TF32.
            load_format: "safetensors", or "dummy" for random weights.
            page_size: tokens per page of K and V.
            vocab_size: the tokenizer's number of ids; None keeps every row of the LM head.
            context_length: longest sequence served; None takes the model's own, a larger one is refused.
            shard: which part of the model this device holds; None is all of it.

        Raises:
            ModelError: naming the file, field or device and what is wrong with it, before weights are read where possible.
        """
        directory, place, part = Path(path), torch.device(device), shard or Shard()
        config = ModelConfig.load(directory)
        source = str(directory / "config.json")
        ids, context = served(config, directory, vocab_size, context_length)
        kind = resolve_dtype(dtype, config)
        check_model(config, source, page_size)
        part.check(config, source)
        check_device(place)
        if kind == torch.float32:
            torch.set_float32_matmul_precision("highest")
        with torch.no_grad():
            tensors = _open(directory, config, load_format, kind, place)
            weights = load_weights(tensors, config, part, dtype=kind, device=place, vocab_size=ids)
            return cls(config, weights, part, dtype=kind, page_size=page_size, vocab_size=ids, context_length=context)

    @property
    def hidden_size(self) -> int:
        """H."""
        return self.config.hidden_size

    @property
    def kv_bytes_per_page(self) -> int:
        """Bytes that one page takes on this device, over all layers."""
        shape = self.shape
        elements = self.config.num_layers * shape.kv_heads * shape.page_size * shape.head_dim
        return 2 * elements * self.dtype.itemsize

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights on this device."""
        return self.weights.bytes()

    def allocate_kv(self, num_pages: int) -> None:
        """Make room for `num_pages` pages and one that belongs to nobody; what was there before is gone."""
        shape = self.shape
        self.k_cache = self.v_cache = self.weights.embedding.new_zeros(0)
        size = (self.config.num_layers, num_pages + 1, shape.kv_heads, shape.page_size, shape.head_dim)
        # Zeros: a key past a row's length is masked, but 0 times NaN is not 0.
        self.k_cache = torch.zeros(size, dtype=self.dtype, device=self.device)
        self.v_cache = torch.zeros(size, dtype=self.dtype, device=self.device)
        self.num_pages = num_pages

    def forward(self, rows: Rows, runs: Runs | None = None) -> StepOutput:
        """Feed the rows, write K and V of the active ones, give logits and hidden states of `logit_rows`.

        `logits` [R, V] may be a view of wider rows. See `RowDecoder.forward`.
        """
        with torch.no_grad():
            if self.fast_path is not None and self.fast_path.takes(rows):
                return self.fast_path.forward(rows)
            return self._forward(rows, self._attention(rows, runs))

    def plans(self, rows: int, runs: Runs) -> bool:
        """See `Planner`: long runs take FlashInfer's kernel, but for steps so small that launching their kernels takes longest."""
        return rows > SMALL_ROWS and _long(runs) and self._has_ragged()

    def skips(self, rows: int) -> bool:
        """See `Skipper`: the fast path does."""
        return self.fast_path is not None and self.fast_path.skips(rows)

    def _forward(self, rows: Rows, attend: Attend) -> StepOutput:
        from models.cuda.kernels.rms_norm import rms_norm
        from models.cuda.kernels.rotate_store import rotate_store
        from models.cuda.kernels.silu_mul import silu_mul

        weights, eps, overlap = self.weights, self.config.rms_norm_eps, self.overlap
        sums = self.shard.fused(max(len(rows), LEAST_ROWS))
        own = self._buffers(len(rows), sums)
        attention, mlp = own.deltas
        rms_norm(weights.embedding, weights.layers[0].input_norm, eps, own.normed, index=rows.tokens, keep=own.x)
        for index, layer in enumerate(weights.layers):
            if index:
                self._add_norm(mlp, own, layer.input_norm, sums)
            self._linear(own.normed, layer, "qkv", own.qkv)
            rotate_store(
                own.qkv,
                layer.qk_norm,
                self.rotations,
                rows.positions,
                rows.slots,
                rows.page_table,
                self.k_cache[index],
                self.v_cache[index],
                self.shape,
                overlap=overlap,
            )
            attend(index, own.qkv, own.attended)
            self._linear(own.attended, layer, "o", attention)
            self._add_norm(attention, own, layer.mlp_norm, sums)
            self._linear(own.normed, layer, "gate_up", own.gate_up)
            silu_mul(own.gate_up, own.act, overlap=overlap)
            self._linear(own.act, layer, "down", mlp[: len(rows)])
        hidden = self._last_norm(mlp, own, rows.logit_rows, sums)
        return StepOutput(logits=self._logits(hidden), hidden=hidden)

    def _add_norm(self, delta: torch.Tensor, own: _Buffers, weight: torch.Tensor, sums: FusedSums | None) -> None:
        """x += all ranks' deltas; normed = norm(x) * weight."""
        from models.cuda.kernels.rms_norm import rms_norm

        eps = self.config.rms_norm_eps
        if sums is None:
            self.shard.all_reduce(delta[: len(own.x)])
            rms_norm(own.x, weight, eps, own.normed, delta=delta, keep=own.x, overlap=self.overlap)
        else:
            sums.add_norm(delta, own.x, weight, eps, own.normed, overlap=self.overlap)

    def _last_norm(
        self, delta: torch.Tensor, own: _Buffers, logit_rows: torch.Tensor, sums: FusedSums | None
    ) -> torch.Tensor:
        """[R, H] the LM head's input."""
        from models.cuda.kernels.rms_norm import rms_norm

        weight = self.weights.norm
        if sums is not None:
            self._add_norm(delta, own, weight, sums)
            return own.normed.index_select(0, logit_rows)
        self.shard.all_reduce(delta[: len(own.x)])
        hidden = own.x.new_empty((len(logit_rows), self.config.hidden_size))
        eps = self.config.rms_norm_eps
        rms_norm(own.x, weight, eps, hidden, delta=delta, index=logit_rows, overlap=self.overlap)
        return hidden

    def _linear(self, x: torch.Tensor, layer: LayerWeights, kind: MatrixKind, out: torch.Tensor) -> None:
        weight, bias = layer.matrices[kind].t(), layer.biases.get(kind)
        if bias is None:
            torch.mm(x, weight, out=out)
        else:
            torch.addmm(bias, x, weight, out=out)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        head = self.weights.head.t()
        wide = (
            torch.mm(hidden, head) if self.dtype == torch.float32 else torch.mm(hidden, head, out_dtype=torch.float32)
        )
        return self.shard.all_gather(wide)[:, : self.vocab_size]

    def _attention(self, rows: Rows, runs: Runs | None) -> Attend:
        """Plan a step's attention."""
        if runs is not None and _long(runs) and self._has_ragged():
            return self._ragged_attention(rows, runs)
        return self._tiled_attention(rows)

    def _has_ragged(self) -> bool:
        return self.ragged_prefill and self.dtype != torch.float32 and self.device.type == "cuda"

    def _ragged_attention(self, rows: Rows, runs: Runs) -> Attend:
        if self._ragged is None:
            self._ragged = RaggedPrefill(self.shape, self.dtype, self.device, self.processors)
        ragged = self._ragged
        ragged.plan(runs, rows.page_table)

        def attend(layer: int, qkv: torch.Tensor, out: torch.Tensor) -> None:
            ragged.attend(qkv, self.k_cache[layer], self.v_cache[layer], out)

        return attend

    def _tiled_attention(self, rows: Rows) -> Attend:
        from models.cuda.kernels.attention_tasks import list_tasks
        from models.cuda.kernels.paged_attention import AttentionScratch, paged_attention

        shape, cut = self.shape, self._tiles(rows)
        tasks = list_tasks(
            rows.positions,
            rows.leaders,
            rows.counts,
            rows.slots,
            runs=len(rows.page_table),
            group=shape.heads // shape.kv_heads,
            kv_heads=shape.kv_heads,
            shape=cut,
        )
        scratch = AttentionScratch.of(tasks, shape, cut)

        def attend(layer: int, qkv: torch.Tensor, out: torch.Tensor) -> None:
            paged_attention(
                qkv,
                self.k_cache[layer],
                self.v_cache[layer],
                out,
                tasks,
                scratch,
                rows.positions,
                rows.page_table,
                shape,
                cut,
                overlap=self.overlap,
            )

        return attend

    def _tiles(self, rows: Rows) -> TileShape:
        shape = self.shape
        return choose_tiles(
            len(rows),
            len(rows.logit_rows),
            group=shape.heads // shape.kv_heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            dtype=self.dtype,
            processors=self.processors,
        )

    def _buffers(self, count: int, sums: FusedSums | None) -> _Buffers:
        buffers = {
            name: torch.empty(size, dtype=self.dtype, device=self.device)
            for name, size in self._buffer_sizes(count).items()
        }
        buffers["attended"].zero_()
        delta = buffers.pop("delta")
        return _Buffers(**buffers, deltas=(delta, delta) if sums is None else sums.parts(len(delta)))

    def _buffer_sizes(self, count: int) -> dict[str, tuple[int, int]]:
        shape, hidden, padded = self.shape, self.config.hidden_size, max(count, LEAST_ROWS)
        intermediate = self.config.intermediate_size // self.shard.world
        return {
            "x": (count, hidden),
            "normed": (count, hidden),
            "qkv": (count, (shape.heads + 2 * shape.kv_heads) * shape.head_dim),
            "attended": (padded, shape.heads * shape.head_dim),
            "delta": (padded, hidden),
            "gate_up": (count, 2 * intermediate),
            "act": (count, intermediate),
        }


def _open(
    directory: Path, config: ModelConfig, load_format: str, dtype: torch.dtype, device: torch.device
) -> TensorSource:
    if load_format not in LOAD_FORMATS:
        raise ModelError(f"load_format {load_format!r} is not known; known are {', '.join(LOAD_FORMATS)}")
    return DummyWeights(config, dtype, device) if load_format == "dummy" else Checkpoint(directory, config)


def _long(runs: Runs) -> bool:
    longest = (runs.starts + runs.counts).max(initial=0)
    return bool(runs.counts.max(initial=0) >= RAGGED_ROWS and longest >= RAGGED_KEYS)


def _half_rotations(config: ModelConfig, length: int, device: torch.device) -> torch.Tensor:
    """The second halves of `rotary_table`: cos, and sin with its plain sign."""
    table = rotary_table(config.rope, config.head_dim, length, torch.float32)
    return table[:, :, 0, config.head_dim // 2 :].contiguous().to(device)


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
