"""What split models must do on real GPUs, each check in a process of its own: `python -m tests.models.parallel.on_gpus CHECK`."""

from __future__ import annotations

import logging
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from models.cuda.decoder import CudaDecoder
from models.device_runner import DeviceRunner
from models.kv_cache import KvCache
from models.parallel.leader import LeadingDecoder, SplitModel
from models.parallel.split_memory import SplitMemory
from models.resident import NO_ROUTE, OWN_TOKEN, SlotSetup, StepRecord, StepRows
from models.rows import RowDecoder
from tests.models.cuda import stage
from tests.models.hash_rows import PAGE, HashRows
from tests.models.parallel import split_hash
from tests.models.schedules import ROUTES, Schedule
from tests.models.tiny import tiny_model
from trouterd import logs
from trouterd.worker.rank_processes import RankProcesses

SLOTS = 8
BUCKETS = (1, 2, 4, 8, 12, 16, 24)
CONTEXT = 512
WIDE: dict[str, Any] = {"hidden": 256, "heads": 8, "kv_heads": 4, "head_dim": 64, "ffn": 384, "layers": 3}


def say(*words: object) -> None:
    print(*words, flush=True)  # noqa: T201


@contextmanager
def processes(world: int, module: str = "trouterd.worker.rank") -> Iterator[RankProcesses]:
    started = RankProcesses("split", world, log_level="info", log_format="text", on_loss=say, module=module)
    yield started
    started.close()


def tiny(folder: Path, **changes: Any) -> Path:
    return tiny_model(folder, "qwen3", tokenizer=False, tied=False, vocab=301, **(WIDE | changes))


def options(dtype: str) -> dict[str, Any]:
    return {"page_size": 16, "vocab_size": 290, "context_length": CONTEXT, "dtype": dtype}


def play(decoder: RowDecoder, graphs: bool) -> list[list[int]]:
    """Ids of 6 requests: prompts of several lengths at once, then 60 steps of own tokens, two in flight."""
    runner = DeviceRunner(decoder, max_slots=SLOTS, max_pages=CONTEXT // 16, buckets=BUCKETS)
    runner.set_routes(())
    if graphs:
        runner.capture()
        say("graphs:", runner.graph_bytes >> 20, "MiB")
    generator = np.random.default_rng(0)
    lengths = [1, 3, 17, 64, 90, 200]
    for slot, length in enumerate(lengths):
        runner.setup(request(slot, length))
        runner.set_pages(slot, 0, range(slot * 32, slot * 32 + 32))
    rows = StepRows(
        slots=np.repeat(np.arange(6), lengths),
        tokens=generator.integers(0, 256, sum(lengths)),
        positions=np.concatenate([np.arange(length) for length in lengths]),
        logit_rows=np.cumsum(lengths) - 1,
    )
    runner.launch(rows)
    own = StepRows(np.arange(6), np.full(6, OWN_TOKEN), np.zeros(6, np.int64), np.arange(6))
    assert runner.quick(own) is graphs
    records: list[StepRecord] = []
    while len(records) < 61:
        if runner.in_flight < 2:
            runner.launch(own)
        if (record := runner.poll()) is not None:
            records.append(record)
    while runner.in_flight:
        runner.poll()
    return [[int(record.tokens[row]) for record in records] for row in range(6)]


def request(slot: int, prompt: int) -> SlotSetup:
    return SlotSetup(
        slot=slot,
        prompt_length=prompt,
        max_tokens=1000,
        min_tokens=0,
        stop_ids=(),
        temperature=0.7 if slot == 5 else 0.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        seed=slot,
        choice=0,
        route=NO_ROUTE,
        routable=False,
        params=(),
    )


def ids(folder: Path, world: int) -> None:
    """In float32 a split model writes what the whole one writes, in graphs and outside."""
    directory = tiny(folder)
    whole = CudaDecoder.load(directory, device="cuda:0", **options("float32"))
    whole.allocate_kv(200)
    with processes(world) as others:
        model = SplitModel(str(directory), tuple(f"cuda:{rank}" for rank in range(world)), **options("float32"))
        leader = LeadingDecoder(model, others.ranks)
        leader.allocate_kv(200)
        expected = play(whole, graphs=False)
        assert len({token for line in expected for token in line}) > 30
        for graphs in (False, True, True):
            if graphs:
                leader.allocate_kv(200)  # what was captured is gone on all ranks
            found = play(leader, graphs)
            assert found == expected, f"graphs {graphs}: {found} instead of {expected}"
        memory = SplitMemory(leader.device, others.ranks)
        memory.start_peak()
        say("held", memory.held(), "peak", memory.peak(), "free", memory.every_device())
        assert memory.peak() >= memory.held() > leader.weight_bytes
        leader.close()


def bf16(folder: Path, world: int) -> None:
    """In bfloat16 a split model's logits are those of the whole one within rounding."""
    directory = tiny(folder, hidden=512, ffn=1024, layers=4, dtype=torch.bfloat16)
    whole = CudaDecoder.load(directory, device="cuda:0", **options("bfloat16"))
    whole.allocate_kv(200)
    table = stage.page_table(6, CONTEXT, 16)
    with processes(world) as others:
        model = SplitModel(str(directory), tuple(f"cuda:{rank}" for rank in range(world)), **options("bfloat16"))
        leader = LeadingDecoder(model, others.ranks)
        leader.allocate_kv(200)
        generator = np.random.default_rng(1)
        same = total = 0
        for counts in ([200, 3, 70, 1], [1, 1, 1, 1], [4, 1, 8, 2], [1, 2, 1, 1]):
            runs: list[stage.Run] = []
            for slot, count in enumerate(counts):
                start = 0 if counts[0] == 200 else 200 * (slot == 0) + 100 * (slot > 0)
                runs.append((slot, start, [int(token) for token in generator.integers(0, 256, count)]))
            rows = stage.device_rows(runs, table, "cuda:0")
            planned = stage.runs_of(runs)
            a, b = whole.forward(rows, planned).logits, leader.forward(rows, planned).logits
            scale = a.std()
            say(counts, "largest difference", float((a - b).abs().max() / scale), "of a standard deviation")
            assert (a - b).abs().max() < 0.25 * scale
            assert (a - b).abs().mean() < 0.03 * scale
            same += int((a.argmax(-1) == b.argmax(-1)).sum())
            total += len(a)
        say("same largest logit:", same, "of", total)
        assert same > 0.9 * total
        leader.close()


def schedule(folder: Path, world: int) -> None:
    """Whatever is scheduled, ranks decide what one process decides: every bit, in graphs and outside."""
    del folder
    with processes(world, split_hash.__name__) as others:
        leader = LeadingDecoder(split_hash.model("hash", world, "cuda"), others.ranks, split_hash.load)
        oracle = HashRows(num_pages=1, max_pages=split_hash.PAGES)
        for graphs, routes in ((False, ROUTES), (True, ROUTES), (True, ROUTES[:1])):
            leader.allocate_kv(60)
            runner = DeviceRunner(leader, max_slots=SLOTS, max_pages=split_hash.PAGES, buckets=BUCKETS)
            assert all(runner.set_routes(routes))
            if graphs:
                runner.capture()
            kv = KvCache(60, PAGE, SLOTS, split_hash.PAGES * PAGE, prefix_cache=False)
            played = Schedule(runner, oracle.output_of, kv, random.Random(graphs), routes=routes)
            played.run(300)
            say("graphs", graphs, "rows checked", played.checked, "dead", played.dead)
            assert played.checked > 300
            assert played.dead
        leader.close()


def refused(folder: Path, world: int) -> None:
    """What does not fit on a rank's device is one line."""
    directory = tiny(folder)
    model = SplitModel(str(directory), ("cuda:0", "cuda:77"), **options("float32"))
    with processes(2) as others:
        text = failure(lambda: LeadingDecoder(model, others.ranks))
    assert "rank 1 of 2: device cuda:77" in text, text
    with processes(2) as others:
        fine = replace(model, devices=("cuda:0", "cuda:1"))
        leader = LeadingDecoder(fine, others.ranks)
        text = failure(lambda: leader.allocate_kv(10**9))
        assert "not enough memory for 1000000000 pages" in text, text


def failure(work: Callable[[], object]) -> str:
    from models.config import ModelError

    try:
        work()
    except ModelError as error:
        say(error)
        return str(error)
    return ""


CHECKS = {check.__name__: check for check in (ids, bf16, schedule, refused)}

if __name__ == "__main__":
    logs.setup("split", "info", "text")
    logging.captureWarnings(False)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        CHECKS[sys.argv[1]](Path(name), int(sys.argv[2]))
