"""A whole forward pass in one kernel launch: the fast path of small steps on Hopper. The kernel itself is in mega/."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Protocol

import torch

from models.batch import StepOutput
from models.config import ModelConfig, ModelError
from models.cuda.decoder_weights import MATRICES
from models.cuda.mega_params import Params
from models.cuda.mega_weights import MegaWeights, shape_problem
from models.cuda.nvcc import load_library
from models.cuda.shares import STAGE_BYTES
from models.cuda.tensor_map import Boxes
from models.rows import Rows

MAX_ROWS = 16
DIVIDED_ROWS = 12
"""Larger steps go another way, which is faster there: where the kernel has most of the multiprocessors, and where half of them or
fewer. On an H200, by earlier kernels, decode steps of 16 and 24 rows took at 1,024 tokens 1.58 and 2.46 ms of Qwen3-0.6B with
R2R's head (2.41 ms of 32 rows by cuBLAS and Triton), 17.2 and 21.3 ms of Qwen3-32B (20.0 ms of 32); on 40 % 4 and 16 rows of
Qwen3-0.6B at 600 tokens 1.12 and 2.01 ms (1.43 and 1.78)."""
_HALF = 0.5
ROW_COUNTS = (8, 16)
"""Rows for which the kernel is compiled; a step takes the smallest that holds it."""
KEY_TILE = 16
"""A page holds a multiple of so many tokens."""
_QUERY_BLOCK = 64
_SOURCES = Path(__file__).parent / "mega"


def served_rows(share: float) -> int:
    """Most rows of a step that is faster in the kernel, where it takes this part of the multiprocessors."""
    return MAX_ROWS if share > _HALF else DIVIDED_ROWS


class Launcher(Protocol):
    """Starts the compiled kernel."""

    def encode(self, boxes: Boxes) -> bytes:
        """The kernel's tensor map of them. Raises ModelError."""
        ...

    def launch(self, params: Params, rows: int, grid: int) -> None:
        """Enqueue it on the current stream, in the variant for up to `rows` rows. Raises ModelError."""
        ...


def unsupported(config: ModelConfig, dtype: torch.dtype, capability: tuple[int, int]) -> str:
    """Why the megakernel cannot run a model; empty if it can.

    Args:
        config: the model's shape.
        dtype: of weights, activations, K and V.
        capability: compute capability of the device.
    """
    if capability != (9, 0):
        return f"the megakernel is for Hopper (compute capability 9.0), not {capability[0]}.{capability[1]}"
    if dtype != torch.bfloat16:
        return f"the megakernel computes in bfloat16, not {str(dtype).removeprefix('torch.')}"
    if config.head_dim not in (64, 128):
        return f"head_dim {config.head_dim} is neither 64 nor 128"
    if config.num_heads // config.num_kv_heads > _QUERY_BLOCK:
        return f"more than {_QUERY_BLOCK} query heads share a KV head"
    return shape_problem(config)


class Megakernel:
    """Runs steps of up to 16 rows. One launch at a time: scratch is shared between them.

    Args:
        weights: dealt to `weights.grid` SMs, all of which must be free to run the kernel at the same time.
        k_cache: [layers, pages, kv_heads, page_size, head_dim] bfloat16, contiguous.
        v_cache: the same for V.
        rotations: [context_length, 2, head_dim / 2] float32 cos and sin.
        launcher: how the kernel is started; None compiles it for the GPU.
        most_rows: of a step that it takes, at most `MAX_ROWS`.

    Raises:
        ModelError: the kernel cannot be compiled, or pages do not suit it.
    """

    def __init__(
        self,
        weights: MegaWeights,
        *,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        rotations: torch.Tensor,
        launcher: Launcher | None = None,
        most_rows: int = MAX_ROWS,
    ) -> None:
        self.weights = weights
        self._most_rows = most_rows
        self.config = config = weights.config
        self.vocab_size = weights.vocab_size
        # Kept alive: the kernel knows addresses only.
        self._tensors = [k_cache, v_cache, rotations]
        if k_cache[0].numel() // config.head_dim >= 2**31:
            raise ModelError(
                f"the megakernel addresses fewer than 2^31 tokens times KV heads, not {k_cache.shape[1:4]}"
            )
        if k_cache.shape[3] % KEY_TILE:
            raise ModelError(f"the megakernel needs pages of a multiple of {KEY_TILE} tokens, not {k_cache.shape[3]}")
        self._split_tasks = 4 * weights.grid
        scratch = self._scratch
        self._params = Params(
            embedding=weights.embedding.data_ptr(),
            vectors=weights.vectors.data_ptr(),
            vector_stride=weights.vector_stride,
            final_norm=weights.final_norm.data_ptr(),
            rotations=rotations.data_ptr(),
            k_cache=k_cache.data_ptr(),
            v_cache=v_cache.data_ptr(),
            cache_layer=k_cache.stride(0),
            x=scratch(MAX_ROWS * config.hidden_size, torch.bfloat16),
            qkv=scratch(MAX_ROWS * (config.q_size + 2 * config.kv_size), torch.bfloat16),
            attended=scratch(MAX_ROWS * config.q_size, torch.bfloat16),
            act=scratch(MAX_ROWS * config.intermediate_size, torch.bfloat16),
            partial=scratch(self._split_tasks * _QUERY_BLOCK * config.head_dim, torch.float32),
            partial_sums=scratch(self._split_tasks * _QUERY_BLOCK * 2, torch.float32),
            tickets=scratch(MAX_ROWS * config.num_kv_heads, torch.int32),
            arrivals=scratch(weights.grid, torch.int32),
            layers=config.num_layers,
            hidden=config.hidden_size,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            intermediate=config.intermediate_size,
            vocabulary=self.vocab_size,
            embeddings=len(weights.embedding),
            logit_stride=self.vocab_size,
            page_size=k_cache.shape[3],
            split_tasks=self._split_tasks,
            eps=config.rms_norm_eps,
            inverse_hidden=1.0 / config.hidden_size,
        )
        self._launcher: Launcher = launcher or GpuLauncher(weights)
        self._describe()

    def takes(self, rows: Rows) -> bool:
        """Whether it runs this step faster than others do; depends on the shapes alone."""
        return 0 < len(rows) <= self._most_rows and len(rows.logit_rows) <= self._most_rows

    def skips(self, rows: int) -> bool:
        """See `Skipper`."""
        return rows <= self._most_rows

    def forward(self, rows: Rows) -> StepOutput:
        """As `RowDecoder.forward`, for steps that it `takes`; can be captured."""
        count, wanted, params = len(rows), len(rows.logit_rows), self._params
        logits = torch.empty((wanted, self.vocab_size), device=self.weights.device)
        hidden = self.weights.embedding.new_empty((wanted, self.config.hidden_size))
        params.tokens = rows.tokens.data_ptr()
        params.positions = rows.positions.data_ptr()
        params.slots = rows.slots.data_ptr()
        params.counts = rows.counts.data_ptr()
        params.page_table = rows.page_table.data_ptr()
        params.page_stride = rows.page_table.stride(0)
        params.logit_rows = rows.logit_rows.data_ptr()
        params.logits = logits.data_ptr()
        params.hidden_out = hidden.data_ptr()
        params.rows = count
        params.logit_count = wanted
        variant = next(size for size in ROW_COUNTS if size >= max(count, wanted))
        self._launcher.launch(params, variant, self.weights.grid)
        return StepOutput(logits=logits, hidden=hidden)

    def _scratch(self, elements: int, dtype: torch.dtype) -> int:
        """Address of zeros."""
        tensor = torch.zeros(elements, dtype=dtype, device=self.weights.device)
        self._tensors.append(tensor)
        return tensor.data_ptr()

    def _describe(self) -> None:
        """Where matrices and vectors lie."""
        weights, params = self.weights, self._params
        rotation = 0
        for matrix, (shares, layer, sizes) in zip(params.matrices, weights.dealt(), strict=True):
            matrix.units = shares.units
            matrix.blocks = shares.blocks
            matrix.layer_units = layer
            # The SMs with a unit more than others take turns.
            matrix.rotation = rotation
            rotation = (rotation + shares.extra) % weights.grid
            for index, (units, boxes) in enumerate(zip(shares.tile_sizes(), sizes, strict=True)):
                matrix.maps[index][:] = self._launcher.encode(boxes)
                matrix.tile_units[index] = units
                matrix.steps[index] = shares.step(units)

        def offset(name: str) -> int:
            return weights.vector_offsets.get(name, (-1, 0))[0]

        params.input_norm, params.mlp_norm = offset("input_norm"), offset("mlp_norm")
        params.q_norm, params.k_norm = offset("q_norm"), offset("k_norm")
        for index, kind in enumerate(MATRICES):
            params.bias[index] = offset(f"{kind}_bias")


class GpuLauncher:
    """The kernel compiled for a model's shape; compiling takes about a minute, once per shape.

    Raises:
        ModelError: it cannot be compiled or loaded.
    """

    def __init__(self, weights: MegaWeights, flags: tuple[str, ...] = ()) -> None:
        self._device = weights.device
        shape = (*variant_flags(weights), *flags)
        units = [(f"-DMEGA_ROWS={rows}", *shape) for rows in ROW_COUNTS]
        self._library = load_library(_SOURCES, units, "megakernel.cu")
        self._functions = {rows: self._function(f"mega_launch_{rows}") for rows in ROW_COUNTS}

    def encode(self, boxes: Boxes) -> bytes:
        """See `Launcher`."""
        return boxes.encode()

    def launch(self, params: Params, rows: int, grid: int) -> None:
        """See `Launcher`."""
        stream = torch.cuda.current_stream(self._device).cuda_stream
        with torch.cuda.device(self._device):
            error = self._functions[rows](ctypes.byref(params), grid, ctypes.c_void_p(stream))
        if error:
            raise ModelError(f"the megakernel did not start on {grid} SMs: {error.decode()}")

    def _function(self, name: str) -> ctypes._NamedFuncPointer:
        function = self._library[name]
        function.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
        function.restype = ctypes.c_char_p
        return function


def variant_flags(weights: MegaWeights) -> tuple[str, ...]:
    """What the kernel is compiled for: the sizes of its tiles and heads."""
    shares = weights.shares
    norm = shares["qkv"].tile_mask() | shares["gate_up"].tile_mask() | weights.head_shares.tile_mask()
    plain = shares["o"].tile_mask() | shares["down"].tile_mask()
    return (
        f"-DMEGA_STAGE_BYTES={STAGE_BYTES}",
        f"-DMEGA_NORM_UNITS={norm:#x}",
        f"-DMEGA_PLAIN_UNITS={plain:#x}",
        f"-DMEGA_HEAD_DIM={weights.config.head_dim}",
    )
