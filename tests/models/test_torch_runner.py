"""The reference runner against transformers, and its promise that rows do not depend on their batch."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import models.attention
import models.decoder
from models.batch import Batch, StepOutput
from models.kv_cache import KvCache
from models.linear import RowPlan
from models.torch_runner import TorchRunner
from tests.models.tiny import tiny_llama, tiny_model, tiny_qwen2, tiny_qwen3

PAGE = 16
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 128}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 3.0}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"family": "qwen3"},
    "qwen3-untied": {"family": "qwen3", "tied": False, "attention_bias": True},
    "qwen2": {"family": "qwen2"},
    "qwen2-yarn": {"family": "qwen2", "tied": False, "rope": YARN},
    "llama3": {"family": "llama", "tied": False, "rope": LLAMA3},
    "llama-mha-yarn": {"family": "llama", "kv_heads": 4, "rope": YARN | {"beta_fast": 16, "attention_factor": 1.2}},
    "llama-gqa3": {"family": "llama", "heads": 6, "hidden": 96, "rope": LINEAR, "mlp_bias": True},
    "llama-mqa8": {"family": "llama", "heads": 8, "kv_heads": 1, "hidden": 128},
}


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (length,), generator=generator).tolist()


@dataclass
class Driver:
    """Feeds requests through a runner and a KvCache, as a scheduler would."""

    runner: TorchRunner
    kv: KvCache
    ids: dict[int, list[int]] = field(default_factory=dict)
    fed: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, runner: TorchRunner, prefix_cache: bool = False) -> Driver:
        return cls(runner, KvCache(runner.num_pages, PAGE, 16, runner.context_length, prefix_cache))

    def open(self, ids: list[int]) -> int:
        slot = self.kv.open()
        assert slot is not None
        self.ids[slot] = list(ids)
        self.fed[slot] = self.kv.match(slot, ids)
        return slot

    def close(self, slot: int) -> None:
        self.kv.close(slot)
        del self.ids[slot], self.fed[slot]

    def step(self, counts: dict[int, int], wanted: str = "all") -> StepOutput:
        """Feed the next `counts[slot]` ids of each slot; logits of all rows or of each slot's last."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        last = []
        for slot, count in counts.items():
            start = self.fed[slot]
            assert self.kv.reserve(slot, start + count)
            tokens += self.ids[slot][start : start + count]
            positions += range(start, start + count)
            slots += [slot] * count
            last.append(len(tokens) - 1)
            self.fed[slot] += count
        rows = np.arange(len(tokens)) if wanted == "all" else np.array(last, np.int64)
        batch = Batch(
            np.array(tokens, np.int64),
            np.array(positions, np.int64),
            np.array(slots, np.int64),
            self.kv.page_table,
            rows,
            np.zeros(len(rows), np.int64),
        )
        output = self.runner.step(batch)
        for slot in counts:
            self.kv.commit(slot, self.ids[slot], self.fed[slot])
        return output


def load(directory: Path, num_pages: int = 96, **options: Any) -> TorchRunner:
    return TorchRunner.load(directory, num_pages=num_pages, page_size=PAGE, **options)


def alone(runner: TorchRunner, ids: list[int]) -> StepOutput:
    """Logits and hidden states of every position, in one prefill of one request."""
    driver = Driver.of(runner)
    return driver.step({driver.open(ids): len(ids)})


def reference_logits(directory: Path, ids: list[int]) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory)
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([ids]), use_cache=False).logits[0]
    return logits


@pytest.mark.parametrize("name", MODELS)
def test_greedy_text_equals_transformers(tmp_path: Path, name: str) -> None:
    """A prompt in chunks, then 200 tokens one by one; transformers reads the whole in one go."""
    directory = tiny_model(tmp_path, **MODELS[name])
    driver = Driver.of(load(directory))
    slot = driver.open(prompt(70))
    rows = [driver.step({slot: count}).logits for count in (33, 1, 20, 16)]
    for _ in range(200):
        driver.ids[slot].append(int(rows[-1][-1].argmax()))
        rows.append(driver.step({slot: 1}).logits)
    logits = torch.cat(rows)
    expected = reference_logits(directory, driver.ids[slot])
    assert (logits - expected).abs().max() < 1e-4
    assert logits.argmax(-1)[69:-1].tolist() == driver.ids[slot][70:]
    assert expected.argmax(-1)[69:-1].tolist() == driver.ids[slot][70:]
    assert len(set(driver.ids[slot][70:])) > 10


@pytest.mark.parametrize("page_size", [1, 7, 48, 200])
def test_any_page_size(tmp_path: Path, page_size: int) -> None:
    directory = tiny_qwen3(tmp_path)
    ids = prompt(290)
    runner = TorchRunner.load(directory, num_pages=1 + 300 // page_size, page_size=page_size)
    table = np.random.default_rng(0).permutation(runner.num_pages).astype(np.int32)[None]
    rows = []
    for start, end in ((0, 130), (130, 131), (131, 200), (200, 203), (203, 290)):
        positions = np.arange(start, end)
        zeros = np.zeros(end - start, np.int64)
        batch = Batch(np.array(ids[start:end]), positions, zeros, table, np.arange(end - start), zeros)
        rows.append(runner.step(batch).logits)
    whole = np.arange(290)
    once = runner.step(Batch(np.array(ids), whole, whole * 0, table, whole, whole)).logits
    assert torch.equal(torch.cat(rows), once)
    assert (once - alone(load(directory), ids).logits).abs().max() < 1e-4


def test_logits_are_cut_to_the_tokenizer(tmp_path: Path) -> None:
    directory = tiny_qwen3(tmp_path)
    full, cut = load(directory), load(directory, vocab_size=258)
    ids = prompt(9)
    assert cut.vocab_size == 258
    assert torch.equal(alone(cut, ids).logits, alone(full, ids).logits[:, :258])


def test_hidden_is_the_head_input(tmp_path: Path) -> None:
    directory = tiny_qwen2(tmp_path)
    runner = load(directory)
    output = alone(runner, prompt(9))
    assert output.hidden.shape == (9, runner.hidden_size)
    assert (output.hidden @ runner._decoder.head.T - output.logits).abs().max() < 1e-4


def test_bfloat16_stays_close(tmp_path: Path) -> None:
    directory = tiny_qwen3(tmp_path)
    ids = prompt(150)
    exact, rounded = alone(load(directory), ids).logits, alone(load(directory, dtype="bfloat16"), ids).logits
    assert rounded.dtype == torch.float32
    # Random weights amplify: bfloat16 keeps 8 bits, and these logits are some 10 wide.
    assert (exact - rounded).abs().mean() < 0.3
    assert (exact.argmax(-1) == rounded.argmax(-1)).float().mean() > 0.8


def test_no_wanted_rows(tmp_path: Path) -> None:
    runner = load(tiny_qwen3(tmp_path))
    driver = Driver.of(runner)
    slot = driver.open(prompt(5))
    assert driver.kv.reserve(slot, 5)
    empty = np.zeros(0, np.int64)
    rows = np.arange(5)
    output = runner.step(Batch(np.array(driver.ids[slot]), rows, np.full(5, slot), driver.kv.page_table, empty, empty))
    assert output.logits.shape == (0, 260)
    assert output.hidden.shape == (0, 32)


LENGTHS = (310, 128, 129, 64, 17, 260)


@pytest.fixture(scope="module")
def promises(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[TorchRunner, list[StepOutput]]]:
    """Runners, and what each request yields alone, computed by one prefill."""
    root = tmp_path_factory.mktemp("promises")
    runners = {
        "qwen3": load(tiny_qwen3(root / "a")),
        "llama-mha": load(tiny_llama(root / "b", kv_heads=4, tied=False)),
        "llama-gqa3": load(tiny_llama(root / "c", heads=6, hidden=96)),
        "bfloat16": load(tiny_qwen2(root / "d"), dtype="bfloat16"),
    }
    return {
        name: (runner, [alone(runner, prompt(length, seed)) for seed, length in enumerate(LENGTHS)])
        for name, runner in runners.items()
    }


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.randoms(use_true_random=False), st.sampled_from([1, 2, 5, 30, 100, 400]))
@pytest.mark.parametrize("name", ["qwen3", "llama-mha", "llama-gqa3", "bfloat16"])
def test_rows_do_not_depend_on_their_batch(
    promises: dict[str, tuple[TorchRunner, list[StepOutput]]], name: str, draw: random.Random, largest: int
) -> None:
    """Any mixture of prefill, extend and decode rows gives every row the bits that it has alone."""
    runner, expected = promises[name]
    driver = Driver.of(runner)
    order = draw.sample(range(len(LENGTHS)), draw.randint(1, len(LENGTHS)))
    slots = {driver.open(prompt(LENGTHS[seed], seed)): seed for seed in order}
    for slot in slots:
        # Start anywhere: what lies before is fed in one step first.
        start = draw.randint(0, len(driver.ids[slot]) - 1)
        if start:
            driver.step({slot: start})
    for _ in range(6):
        counts = {}
        for slot in draw.sample(list(slots), draw.randint(1, len(slots))):
            left = len(driver.ids[slot]) - driver.fed[slot]
            if left:
                counts[slot] = min(left, draw.randint(1, largest))
        if not counts:
            break
        before = dict(driver.fed)
        output = driver.step(counts)
        place = 0
        for slot, count in counts.items():
            span = slice(before[slot], before[slot] + count)
            assert torch.equal(output.logits[place : place + count], expected[slots[slot]].logits[span])
            assert torch.equal(output.hidden[place : place + count], expected[slots[slot]].hidden[span])
            place += count


@pytest.mark.parametrize("counts", [(16, 32), (16,), (1,)])
def test_other_machines_plans_hold_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counts: tuple[int, ...]
) -> None:
    """Where kernels allow fewer row counts, or only single rows, results and the promise stay."""
    directory = tiny_qwen3(tmp_path)
    ids = prompt(150)
    expected = alone(load(directory), ids).logits
    monkeypatch.setattr(models.decoder, "plan_rows", lambda _: RowPlan(counts))
    monkeypatch.setattr(models.attention, "plan_batched", lambda *_, **__: RowPlan(counts))
    runner = load(directory)
    once = alone(runner, ids).logits
    assert (once - expected).abs().max() < 1e-4
    driver = Driver.of(runner)
    slot, other = driver.open(ids), driver.open(prompt(40, 1))
    rows = [driver.step({slot: 100}).logits]
    rows += [driver.step({slot: 5, other: 3}).logits[:5] for _ in range(10)]
    assert torch.equal(torch.cat(rows), once)


def test_truncated_and_fed_again(tmp_path: Path) -> None:
    runner = load(tiny_qwen3(tmp_path))
    ids = prompt(150)
    expected = alone(runner, ids).logits
    driver = Driver.of(runner, prefix_cache=True)
    slot = driver.open(ids[:100] + prompt(40, 7))
    driver.step({slot: 140})
    driver.fed[slot] = driver.kv.truncate(slot, 100)
    assert driver.fed[slot] == 96
    driver.ids[slot] = ids
    assert torch.equal(driver.step({slot: 54}).logits, expected[96:])


def test_prefix_cache_changes_no_bit(tmp_path: Path) -> None:
    """Same requests with and without the cache, one aborted in mid-prefill and sent again."""
    runner = load(tiny_qwen3(tmp_path))
    shared = prompt(100)
    requests = [shared + prompt(30, seed) for seed in range(4)]
    expected = [alone(runner, ids).logits for ids in requests]
    driver = Driver.of(runner, prefix_cache=True)
    aborted = driver.open(requests[3])
    driver.step({aborted: 40})
    driver.close(aborted)
    assert driver.kv.counts()["cached"] == 2
    hits = []
    for ids, logits in [*zip(requests, expected, strict=True)] * 2:
        slot = driver.open(ids)
        hits.append(driver.fed[slot])
        assert torch.equal(driver.step({slot: len(ids) - driver.fed[slot]}).logits, logits[hits[-1] :])
        driver.close(slot)
        driver.kv.check()
    assert hits == [32, 96, 96, 96, 128, 128, 128, 128]


def test_stale_pages_of_others_are_never_seen(tmp_path: Path) -> None:
    """Pages are reused unwiped: whatever earlier requests left there adds exact zeros."""
    runner = load(tiny_qwen3(tmp_path), num_pages=12)
    ids = prompt(37)
    expected = alone(runner, ids).logits
    for seed in range(1, 4):
        alone(runner, prompt(12 * PAGE, seed))
        assert torch.equal(alone(runner, ids).logits, expected)
