"""Requests that end while steps are launched: recycled slots and pages, with the runner inline and in a thread."""

from __future__ import annotations

import asyncio
import random
import threading
from dataclasses import dataclass

import numpy as np
import pytest

from ipc.messages import Abort, Sampling
from models.batch import Batch, StepOutput
from models.kv_cache import KvCache
from models.kv_pool import KvError
from tests.algorithms import reference
from tests.harness import Cluster
from tests.worker.lookup import LookupModel, LookupRunner
from trouterd.config import Route

MODELS = {"small": LookupModel(0, vocab_size=24), "large": LookupModel(1, vocab_size=24)}
CONTEXT = 72


class GuardedCache(KvCache):
    """A cache that raises when it gives or takes a page or a slot while a launched step may read or write it."""

    busy = False

    def _still(self, what: str) -> None:
        if self.busy:
            raise KvError(f"{what} while a step is launched")

    def open(self) -> int | None:
        self._still("a slot is opened")
        return super().open()

    def close(self, slot: int) -> None:
        self._still(f"slot {slot} is closed")
        super().close(slot)

    def reserve(self, slot: int, length: int) -> bool:
        self._still(f"pages are reserved for slot {slot}")
        return super().reserve(slot, length)

    def truncate(self, slot: int, length: int) -> int:
        self._still(f"slot {slot} is truncated")
        return super().truncate(slot, length)


class LaunchedRunner(LookupRunner):
    """Slow enough that messages arrive during a step; looks whether its batch stays its own until the end."""

    def __init__(self, model: LookupModel, *, inline: bool, dice: random.Random, **shape: int) -> None:
        super().__init__(model, **shape)
        self.inline = inline  # type: ignore[misc]
        self.dice = dice
        self.cache: GuardedCache | None = None
        self.threads: set[int] = set()

    def step(self, batch: Batch) -> StepOutput:
        assert self.cache is not None
        self.threads.add(threading.get_ident())
        self.cache.busy = True
        before = batch.page_table.copy()
        output = super().step(batch)
        if not self.inline:
            threading.Event().wait(self.dice.random() * 2e-3)
        assert np.array_equal(before, batch.page_table), "the page table changed under a launched step"
        self.cache.busy = False
        return output


@dataclass
class Job:
    prompt: list[int]
    tokens: int
    abort_at: int
    """Answers are cut off when they have so many tokens."""


def jobs(seed: int) -> list[Job]:
    dice = random.Random(seed)
    return [
        Job(
            [dice.randrange(24) for _ in range(dice.randint(1, 20))],
            dice.randint(1, 50),
            dice.randint(0, 49) if dice.random() < 0.4 else 50,
        )
        for _ in range(64)
    ]


async def answers(seed: int, *, inline: bool, algorithm: str, prefix_cache: bool) -> list[list[int]]:
    """All jobs at once over few slots and pages; what each client got."""
    dice = random.Random(seed)
    shape = {"num_pages": 60, "page_size": 4, "context_length": CONTEXT}
    runners = {name: LaunchedRunner(model, inline=inline, dice=dice, **shape) for name, model in MODELS.items()}
    route = Route(models=list(runners), algorithm=algorithm, params={"p": 0.4} if algorithm == "bernoulli" else {})
    cluster = Cluster(runners, {"demo": route}, max_batch_tokens=24)
    for name, runner in runners.items():
        worker = cluster.workers[name]
        runner.cache = worker.kv = worker.scheduler.kv = GuardedCache(60, 4, 9, CONTEXT, prefix_cache)
        worker.stepper.page_table = worker.kv.page_table

    async def client(job: Job, number: int) -> list[int]:
        rid, answer = cluster.submit(
            "demo", job.prompt, max_tokens=job.tokens, seed=number, temperature=1.0, ignore_eos=True
        )
        await answer.until(job.abort_at)
        if not answer.finish:
            # Straight into the inbox, also in the middle of a step; the answer keeps what it gets.
            cluster.workers["small"].deliver(Abort(rid))
        else:
            assert len(answer.tokens) == job.tokens
        return answer.tokens

    async with cluster.running():
        got = await asyncio.gather(*(client(job, number) for number, job in enumerate(jobs(seed))))
        await cluster.settled()
    on_loop = {threading.get_ident()}
    # A peer that is never asked computes nothing.
    worked = [runner.threads for runner in runners.values() if runner.threads]
    assert worked
    assert all((threads == on_loop) == inline for threads in worked)
    return got


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("algorithm", ["none", "bernoulli"])
async def test_recycled_slots_inline_and_in_a_thread(algorithm: str, prefix_cache: bool) -> None:
    rule = reference.none() if algorithm == "none" else reference.bernoulli(0.4)
    for inline in (True, False):
        got = await answers(7, inline=inline, algorithm=algorithm, prefix_cache=prefix_cache)
        for number, (job, tokens) in enumerate(zip(jobs(7), got, strict=True)):
            sampling = Sampling(seed=number, max_tokens=job.tokens, ignore_eos=True)
            whole = reference.generate(list(MODELS.values()), rule, job.prompt, sampling)
            assert len(tokens) >= min(job.abort_at, job.tokens)
            assert tokens == whole.tokens[: len(tokens)]


def test_double_free_raises() -> None:
    cache = KvCache(4, 4, 2, 16, prefix_cache=True)
    slot = cache.open()
    assert slot is not None
    cache.reserve(slot, 9)
    page = int(cache.page_table[slot, 0])
    cache.close(slot)
    with pytest.raises(KvError, match="not open"):
        cache.close(slot)
    with pytest.raises(KvError, match="released twice"):
        cache._pool.release(page)
    cache.check()
