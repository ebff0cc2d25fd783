"""The megakernel beside the reference runner: same weights, same steps, each with its own K and V."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from models.batch import Batch, StepOutput
from models.config import ModelConfig
from models.cuda.decoder_weights import DecoderWeights, LayerWeights, MatrixKind
from models.cuda.mega_weights import MegaWeights
from models.cuda.megakernel import Launcher, Megakernel
from models.cuda.shares import UNIT
from models.decoder import Decoder
from models.rope import rotary_table
from models.rows import Rows
from models.torch_runner import TorchRunner

SLOTS = 64
# Parts cost nothing, nor do turns: as many as there is room for, so that short contexts are split as well.
PARTS = ("-DMEGA_ROUND_TILES=1", "-DMEGA_MERGE_COST(parts,queries)=0", "-DMEGA_TURNS_COST(turns,share)=0")


def mega_weights(decoder: Decoder, config: ModelConfig, grid: int, device: torch.device) -> MegaWeights:
    """A reference decoder's weights."""

    def place(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device=device, dtype=torch.bfloat16)

    stacks: dict[MatrixKind, torch.Tensor] = {
        kind: torch.stack([place(getattr(layer, kind)) for layer in decoder._layers])
        for kind in ("qkv", "o", "gate_up", "down")
    }
    layers = []
    for index, layer in enumerate(decoder._layers):
        biases = {"qkv": layer.qkv_bias, "o": layer.o_bias, "gate_up": layer.gate_up_bias, "down": layer.down_bias}
        layers.append(
            LayerWeights(
                input_norm=place(layer.input_norm),
                mlp_norm=place(layer.mlp_norm),
                qk_norm=None if layer.qk_norm is None else place(layer.qk_norm[[0, config.num_heads]]),
                matrices={kind: stack[index] for kind, stack in stacks.items()},
                biases={kind: place(bias) for kind, bias in biases.items() if bias is not None},
            )
        )
    head = place(decoder.head)
    padding = head.new_zeros(-len(head) % UNIT, head.shape[1])
    weights = DecoderWeights(place(decoder.embedding), place(decoder.norm), torch.cat((head, padding)), layers, stacks)
    return MegaWeights(config, weights, vocab_size=len(head), grid=grid)


def half_rotations(config: ModelConfig, length: int) -> torch.Tensor:
    """[length, 2, head_dim / 2] float32 cos and sin."""
    table = rotary_table(config.rope, config.head_dim, length, torch.float32)
    return table[:, :, 0, config.head_dim // 2 :].contiguous()


class Pair:
    """A reference runner in float32 and the megakernel, fed with the same runs.

    Args:
        directory: a model of bfloat16 weights.
        launcher: makes the kernel's launcher from its weights.
        grid: SMs.
        page_size, num_pages: of K and V.
        vocab_size: ids of the tokenizer.
        context_length: longest sequence.
    """

    def __init__(
        self,
        directory: Path,
        launcher: Callable[[MegaWeights], Launcher],
        *,
        grid: int,
        page_size: int = 16,
        num_pages: int = 64,
        vocab_size: int | None = None,
        context_length: int = 512,
        device: str = "cpu",
    ) -> None:
        self.device = torch.device(device)
        self.config = ModelConfig.load(directory)
        options = {"num_pages": num_pages, "page_size": page_size, "vocab_size": vocab_size}
        self.exact = TorchRunner.load(directory, context_length=context_length, **options)
        self.rounded = TorchRunner.load(directory, context_length=context_length, dtype="bfloat16", **options)
        self.weights = mega_weights(self.rounded._decoder, self.config, grid, self.device)
        shape = (self.config.num_layers, num_pages, self.config.num_kv_heads, page_size, self.config.head_dim)
        # Not a number where nothing has been written: whoever reads that is found out.
        self.k_cache = torch.full(shape, torch.nan, dtype=torch.bfloat16, device=self.device)
        self.v_cache = torch.full(shape, torch.nan, dtype=torch.bfloat16, device=self.device)
        self.launcher = launcher(self.weights)
        self.kernel = Megakernel(
            self.weights,
            k_cache=self.k_cache,
            v_cache=self.v_cache,
            rotations=half_rotations(self.config, context_length).to(self.device),
            launcher=self.launcher,
        )
        self.page_size = page_size
        generator = np.random.default_rng(0)
        pages = generator.permutation(num_pages)
        self._free = list(pages)
        self.table = np.zeros((SLOTS, -(-context_length // page_size)), np.int32)
        self.lengths = np.zeros(SLOTS, np.int64)
        self._held = np.zeros(SLOTS, np.int64)

    def fill(self, slot: int, length: int) -> None:
        """Give a slot a context of random keys and values, without a step."""
        self._hold(slot, length)
        self.lengths[slot] = length
        at = np.arange(length)
        pages = torch.from_numpy(self.table[slot, at // self.page_size].astype(np.int64))
        inside = torch.from_numpy(at % self.page_size)
        for cache, kind in ((self.k_cache, "_keys"), (self.v_cache, "_values")):
            for layer, own in enumerate(cache):
                rows = torch.randn(own.shape[1], length, own.shape[3]).to(cache.dtype)
                own[pages.to(self.device), :, inside.to(self.device)] = rows.transpose(0, 1).to(self.device)
                for runner in (self.exact, self.rounded):
                    pool = getattr(runner._attention, kind)[layer]
                    pool.view(len(rows), -1, self.page_size, own.shape[3])[:, pages, inside] = rows.to(pool.dtype)

    def batch(self, runs: Sequence[tuple[int, Sequence[int]]], wanted: Sequence[int] | None = None) -> Batch:
        """Further tokens of slots; `wanted` rows (None: the last of each run) give logits."""
        tokens = [token for _, part in runs for token in part]
        positions = np.concatenate([self.lengths[slot] + np.arange(len(part)) for slot, part in runs])
        slots = np.concatenate([np.full(len(part), slot) for slot, part in runs])
        for slot, part in runs:
            self.lengths[slot] += len(part)
            self._hold(slot, self.lengths[slot])
        last = np.cumsum([len(part) for _, part in runs]) - 1
        rows = last if wanted is None else np.asarray(wanted)
        return Batch(np.asarray(tokens), positions, slots, self.table, rows, np.zeros(len(rows), np.int64))

    def rows(self, batch: Batch, idle: int = 0) -> Rows:
        """The same rows for the device, followed by `idle` inactive ones, one of which gives logits."""
        starts = np.r_[True, np.diff(batch.slots) != 0]
        firsts = np.flatnonzero(starts)
        leaders = firsts[np.cumsum(starts) - 1]
        counts = np.zeros(len(batch), np.int64)
        counts[firsts] = np.diff(np.r_[firsts, len(batch)])

        def place(values: np.ndarray, padding: int) -> torch.Tensor:
            padded = np.r_[values, np.full(idle, padding)]
            return torch.from_numpy(padded.astype(np.int32)).to(self.device)

        own = np.arange(len(batch), len(batch) + idle)
        wanted = np.r_[batch.logit_rows, own[:1]].astype(np.int32)
        return Rows(
            tokens=place(batch.tokens, -7),
            positions=place(batch.positions, -1),
            slots=place(batch.slots, 0),
            leaders=torch.from_numpy(np.r_[leaders, own].astype(np.int32)).to(self.device),
            counts=place(counts, 1),
            page_table=torch.from_numpy(batch.page_table).to(self.device),
            logit_rows=torch.from_numpy(wanted).to(self.device),
        )

    def _hold(self, slot: int, tokens: int) -> None:
        """Have pages for so many."""
        while self._held[slot] * self.page_size < tokens:
            self.table[slot, self._held[slot]] = self._free.pop()
            self._held[slot] += 1

    def check(
        self, runs: Sequence[tuple[int, Sequence[int]]], wanted: Sequence[int] | None = None, idle: int = 0
    ) -> None:
        """Run a step both ways and compare."""
        batch = self.batch(runs, wanted)
        exact, rounded = self.exact.step(batch), self.rounded.step(batch)
        mine = self.kernel.forward(self.rows(batch, idle))
        assert_close(mine, exact, rounded)


def assert_close(mine: StepOutput, exact: StepOutput, rounded: StepOutput) -> None:
    """As near to the float32 result as the reference in bfloat16 is, but for a small factor."""
    count = len(exact.logits)
    assert bool(torch.isfinite(mine.logits).all())
    assert bool(torch.isfinite(mine.hidden).all())
    for name in ("logits", "hidden"):
        truth = getattr(exact, name).float()
        size = truth.square().mean().sqrt()
        error = (getattr(mine, name)[:count].float().cpu() - truth).square().mean().sqrt() / size
        usual = (getattr(rounded, name).float() - truth).square().mean().sqrt() / size
        assert error < 2 * usual + 1e-3, f"{name}: relative error {error:.5f}, of the reference {usual:.5f}"
