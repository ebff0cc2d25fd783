"""The kernels of a step on made-up logits, against `models.sampler` and the torch form of the step; for interpreter and GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from models import rng
from models.batch import IntArray
from models.resident import NO_ROUTE, SlotSetup, StepRecord, StepRows
from models.rows import Runs
from models.sampler import Edits, SamplingRows, gumbel_argmax, processed, sample
from models.slots import SlotTable

if TYPE_CHECKING:
    from models.cuda.step_kernels import StepKernels

PLAIN = SlotSetup(
    slot=0,
    prompt_length=1,
    max_tokens=1 << 30,
    min_tokens=0,
    stop_ids=(),
    temperature=0.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    seed=1,
    choice=0,
    route=NO_ROUTE,
    routable=True,
    params=(),
)


def asked(**changes: Any) -> SlotSetup:
    """A slot's setup, plain but for the changes."""
    return replace(PLAIN, **changes)


@dataclass
class Bench:
    """One row per slot over given logits, without a model."""

    kernels: StepKernels
    slots: SlotTable
    turn: int = 0

    @classmethod
    def of(cls, vocab: int, rows: int, device: str, *, on_device: bool) -> Bench:
        from models.cuda.step_kernels import StepKernels  # imports triton

        slots = SlotTable(rows, 4, torch.device(device))
        return cls(StepKernels(slots, vocab, rows=rows, wanted=rows, entries=4, on_device=on_device), slots)

    def draw(self, logits: torch.Tensor, setups: list[SlotSetup], index: IntArray) -> StepRecord:
        """The record of a step whose rows predict the output indices `index` from these logits."""
        count = len(setups)
        for slot, setup in enumerate(setups):
            self.slots.setup(replace(setup, slot=slot))
        every = np.arange(count)
        positions = np.array([s.prompt_length for s in setups]) - 1 + index
        rows = StepRows(every, np.full(count, 3), positions, every)
        runs = Runs(every, np.ones(count, np.int64), positions, every)
        self.kernels.inbox.write(self.turn, rows, runs, self.slots.take(), count)
        device_rows = self.kernels.rows(count, count)
        self.kernels.take_in(device_rows)
        self.kernels.draw(device_rows, logits, ends=True)
        if logits.is_cuda:
            torch.cuda.synchronize()
        self.turn += 1
        record = self.kernels.records.read(self.turn - 1, self.turn, count)
        assert record is not None
        return record


def reference(logits: torch.Tensor, setups: list[SlotSetup], index: IntArray) -> torch.Tensor:
    """What `models.sampler` draws."""
    rows = SamplingRows(
        temperature=np.array([s.temperature for s in setups], np.float32),
        top_k=np.array([s.top_k for s in setups]),
        top_p=np.array([s.top_p for s in setups], np.float32),
        min_p=np.array([s.min_p for s in setups], np.float32),
        seed=np.array([s.seed for s in setups], np.uint64),
        choice=np.array([s.choice for s in setups]),
        output_index=index,
    )
    banned = [
        (row, stop)
        for row, (setup, place) in enumerate(zip(setups, index.tolist(), strict=True))
        if place < setup.min_tokens
        for stop in setup.stop_ids
    ]
    if banned:
        ids = np.array(banned)
        rows.bias = Edits(ids[:, 0], ids[:, 1], np.full(len(ids), -np.inf, np.float32))
    return sample(logits.cpu(), rows)


def edge_setups(logits: torch.Tensor, setup: SlotSetup, seeds: int) -> list[SlotSetup]:
    """The setup with seeds, of the first `seeds`, for which a cut one id off shows at output index 0 of these logits [V].

    The draw is the last id kept, or would without filters be the first one dropped.
    """
    filtered = SamplingRows.greedy(1)
    filtered.temperature[:] = setup.temperature
    plain = processed(logits[None], filtered)
    filtered.top_k = np.array([setup.top_k])
    filtered.top_p[:] = setup.top_p
    filtered.min_p[:] = setup.min_p
    kept = processed(logits[None], filtered)
    ranked = plain[0].sort(descending=True, stable=True).indices
    count = int((kept > float("-inf")).sum())
    tried = np.arange(seeds)
    keys = torch.from_numpy(rng.key_array(tried, setup.choice, 0, rng.Purpose.SAMPLE).view(np.int64))
    last = gumbel_argmax(kept.expand(seeds, -1), keys) == ranked[count - 1]
    wanted = [last]
    if count < len(ranked):
        wanted.append(gumbel_argmax(plain.expand(seeds, -1), keys) == ranked[count])
    return [replace(setup, seed=int(found.nonzero()[0])) for found in wanted if found.any()]


def random_setups(count: int, vocab: int, chance: np.random.Generator) -> list[SlotSetup]:
    """All kinds of sampling parameters."""
    return [
        asked(
            temperature=float(chance.choice([0, 1e-30, 0.3, 0.6, 1, 1, 2, 1e30])),
            top_k=int(chance.choice([0, 0, 1, 2, 5, 20, 60, 500])),
            top_p=float(chance.choice([1, 1, 0.95, 0.8, 0.3, 1e-6])),
            min_p=float(chance.choice([0, 0, 0.02, 0.3, 1])),
            min_tokens=int(chance.choice([0, 4])),
            stop_ids=tuple(chance.choice(vocab, size=int(chance.choice([0, 2, 24])), replace=False).tolist()),
            seed=int(chance.integers(0, 1 << 63)) * 2 + 1,
            choice=int(chance.integers(0, 4)),
            prompt_length=int(chance.integers(1, 50)),
        )
        for _ in range(count)
    ]


def random_logits(kind: str, rows: int, vocab: int, seed: int) -> torch.Tensor:
    """[rows, vocab] logits of one kind: how peaked, how many ties, how many at -inf."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(rows, vocab, generator=generator)
    match kind:
        case "peaked":
            return noise * 4
        case "flat":
            return noise * 0.05
        case "tied":
            return (noise * 2).round()
        case "equal":
            return torch.zeros(rows, vocab)
        case "masked":
            return noise.masked_fill(torch.rand(rows, vocab, generator=generator) < 0.99, float("-inf"))
        case "levels":
            return (noise * 16).round() / 8
        case "tail":
            # The last 35 of the 40 likeliest weigh a sixth of them, but one by one less than (1 - 0.39) of the mean of 150.
            levels = torch.tensor([0.0] * 5 + [-3.772] * 35 + [-9.0] * (vocab - 40))
            return levels.expand(rows, -1)
        case "huge":
            return noise * 1e37
        case "sharp":
            return noise**3 * 3
    raise ValueError(kind)


CUTS = ((40, 0.4), (0, 0.9), (3, 1.0), (0, 0.4), (40, 0.9), (0, 0.99))
"""top_k and top_p."""
KINDS = ("peaked", "flat", "tied", "equal", "masked", "huge", "sharp")
