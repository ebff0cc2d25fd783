"""Real decoders over ranks, on the CPU through Triton's interpreter; run by test_interpreted.py."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

assert os.environ.get("TRITON_INTERPRET") == "1", "run test_interpreted.py"

from models.cuda.decoder import CudaDecoder
from models.cuda.kernels.rms_norm import rms_norm
from models.cuda.kernels.sum_norm import sum_norm
from models.cuda.shard import Shard
from models.device_runner import DeviceRunner
from models.parallel.leader import LeadingDecoder, SplitModel
from models.resident import NO_ROUTE, OWN_TOKEN, SlotSetup, StepRecord, StepRows
from models.rows import RowDecoder
from tests.models.cuda import stage
from tests.models.tiny import tiny_model
from trouterd.worker.rank_processes import RankProcesses

PAGE = 4
CONTEXT = 64
HIDDEN = 40


def normal(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world", [1, 3])
def test_sum_and_norm_in_one_kernel(world: int, dtype: torch.dtype) -> None:
    span, rows = 6, 4
    parts = [normal(2, span, HIDDEN, seed=rank, dtype=dtype) for rank in range(world)]
    x, weight = normal(rows, HIDDEN, seed=9, dtype=dtype), normal(HIDDEN, seed=8, dtype=dtype)
    total = torch.stack([part[1, :rows].float() for part in parts]).sum(0).to(dtype)
    kept, expected = torch.empty_like(x), torch.empty_like(x)
    rms_norm(x, weight, 1e-6, expected, delta=total, keep=kept)
    out, turns = torch.empty_like(x), torch.zeros(span, dtype=torch.int32)
    addresses = torch.tensor([part.data_ptr() for part in parts])
    offset = span * HIDDEN
    sum_norm(addresses, addresses, turns, x, weight, 1e-6, out, rank=0, offset=offset, span=span, signals=False)
    # The interpreter truncates to bfloat16, where a device rounds.
    rounding = 1e-6 if dtype == torch.float32 else 3 * 2**-7
    for value, wanted in ((x, kept), (out, expected)):
        assert ((value - wanted).abs() <= rounding * wanted.abs() + rounding).all()
    assert turns.tolist() == [1] * rows + [0] * (span - rows)


class Alone:
    """`FusedSums` of one rank, which checks that sums take turns on the places."""

    def __init__(self, rows: int) -> None:
        self.memory = torch.full((2, rows, HIDDEN), 7.0)
        self.turns = torch.zeros(rows, dtype=torch.int32)
        self.used: list[int] = []

    def parts(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.memory[0, :rows], self.memory[1, :rows]

    def add_norm(
        self,
        part: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        out: torch.Tensor,
        *,
        overlap: bool,
    ) -> None:
        self.used.append(int(part.storage_offset() > 0))
        addresses = torch.tensor([part.data_ptr()])
        sum_norm(
            addresses, addresses, self.turns, x, weight, eps, out, rank=0, offset=0, span=len(self.turns), signals=False
        )


def test_decoder_with_fused_sums_equals_the_plain_one(tmp_path: Path) -> None:
    directory = tiny_model(tmp_path, "qwen3", tokenizer=False, hidden=HIDDEN, layers=1)
    table = stage.page_table(3, CONTEXT, PAGE)
    sums = Alone(16)
    plain, fused = (
        CudaDecoder.load(directory, device="cpu", page_size=PAGE, shard=shard)
        for shard in (Shard(), Shard(fused=lambda rows: sums if rows <= 16 else None))
    )
    for decoder in (plain, fused):
        decoder.allocate_kv(table.size)
    for runs in ([(0, 0, [1, 2, 3]), (1, 0, [4])], [(1, 1, [9])]):
        rows = stage.device_rows(runs, table, "cpu")
        expected, found = plain.forward(rows), fused.forward(rows)
        assert torch.equal(found.logits, expected.logits)
        assert torch.equal(found.hidden, expected.hidden)
    assert sums.used == [0, 1] * 2


def setup(slot: int, prompt: int, seed: int) -> SlotSetup:
    return SlotSetup(
        slot=slot,
        prompt_length=prompt,
        max_tokens=50,
        min_tokens=0,
        stop_ids=(),
        temperature=0.0 if slot else 0.8,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        seed=seed,
        choice=0,
        route=NO_ROUTE,
        routable=False,
        params=(),
    )


def play(decoder: RowDecoder) -> list[StepRecord]:
    """Two prompts, then steps of own tokens, two in flight."""
    runner = DeviceRunner(decoder, max_slots=3, max_pages=CONTEXT // PAGE)
    prompts = {0: [1, 2, 3, 4, 5], 2: [6, 7]}
    slots = np.repeat(list(prompts), [len(ids) for ids in prompts.values()])
    for slot, ids in prompts.items():
        runner.setup(setup(slot, len(ids), slot))
        runner.set_pages(slot, 0, range(slot * 8, slot * 8 + 8))
    tokens, places = np.concatenate(list(prompts.values())), np.concatenate([np.arange(5), np.arange(2)])
    runner.launch(StepRows(slots, tokens, places, np.array([4, 6])))
    own = StepRows(np.array([0, 2]), np.full(2, OWN_TOKEN), np.zeros(2, np.int64), np.arange(2))
    records: list[StepRecord] = []
    for _ in range(4):
        runner.launch(own)
        record = runner.poll()
        assert record is not None
        records.append(record)
    return records


def test_two_ranks_answer_as_one_device(tmp_path: Path) -> None:
    directory = tiny_model(tmp_path, "qwen3", tokenizer=False, tied=False, vocab=301)
    options = {"page_size": PAGE, "vocab_size": 290, "context_length": CONTEXT}
    whole = CudaDecoder.load(directory, device="cpu", **options)
    whole.allocate_kv(24)
    model = SplitModel(path=str(directory), devices=("cpu", "cpu"), **options)
    processes = RankProcesses("large", 2, log_level="info", log_format="text", on_loss=pytest.fail)
    leader = LeadingDecoder(model, processes.ranks)
    try:
        leader.allocate_kv(24)
        assert leader.weight_bytes < 0.7 * whole.weight_bytes
        assert leader.kv_bytes_per_page * 2 == whole.kv_bytes_per_page
        expected, found = play(whole), play(leader)
        assert [r.tokens.tolist() for r in found] == [r.tokens.tolist() for r in expected]
        assert len({int(r.tokens[0]) for r in found}) > 2
        rows = stage.device_rows([(0, 0, [3, 1, 2])], np.arange(12, dtype=np.int32)[None], "cpu")
        logits = leader.forward(rows).logits
        assert (logits - whole.forward(rows).logits).abs().max() < 1e-4
        assert logits.shape == (3, 290)
    finally:
        leader.close()
        processes.close()
