"""What the decode loop costs the host: microseconds of CPU per step, and how long the device waits for it.

    python -m bench.decode_loop [--streams 8] [--steps 20000] [--depth 2] [--step-us 0] [--repeats 5] [--profile]

One worker over a device that only keeps time: steps of `--step-us` run one after the other. Single-model requests run to their
full length, page accounting and prefix cache included; the new tokens of each step are encoded and pushed into a shared-memory
ring, as for the api. With steps of no time the CPU per step is the loop's whole cost; with longer ones the wall time per step
over theirs says what is left of it. Not in it: what a runner does to queue a step and to read its record.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import os
import pstats
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import uvloop

from bench.command_line import run_command
from ipc.eventfd import create_event
from ipc.layout import RingSpec
from ipc.messages import Message, Sampling, Submit, encode, pack_ids
from ipc.ring import PushResult, RingProducer
from ipc.segment import SharedSegment
from models.batch import Batch, StepOutput
from models.kv_cache import KvCache
from models.resident import DeviceRoute, SlotSetup, StepRecord, StepRows
from trouterd.config import Config, Model
from trouterd.worker.route import ModelFacts, build_routes
from trouterd.worker.worker import Worker

PROMPT = 100
PAGE_SIZE = 16
VOCAB = 151_936


class NoDevice:
    """`Resident` that computes nothing: every row stays and gets the same token after the time of a step."""

    inline = False
    vocab_size = VOCAB
    hidden_size = 8
    page_size = PAGE_SIZE
    max_stop_ids = 8
    embedding: torch.Tensor | None = None

    def __init__(self, depth: int, context: int, streams: int, seconds: float) -> None:
        self.depth = depth
        self.context_length = context
        self.num_pages = 2 * streams * (-(-context // PAGE_SIZE))
        self.idle = 0.0
        """Seconds without a step to run since the first one."""
        self._seconds = seconds
        self._free = 0.0
        self._records: deque[tuple[float, StepRecord]] = deque()
        self._launched = 0
        count = range(streams + 1)
        self._tokens = [np.full(n, 42, np.int32) for n in count]
        self._zeros = [np.zeros(n, np.int32) for n in count]
        self._ones = [np.ones(n, np.bool_) for n in count]

    def set_routes(self, routes: Sequence[DeviceRoute]) -> tuple[bool, ...]:
        """All of them."""
        return (True,) * len(routes)

    def setup(self, setup: SlotSetup) -> None:
        """Nothing to do."""

    def set_pages(self, slot: int, first: int, pages: Sequence[int]) -> None:
        """Nothing to do."""

    def quick(self, rows: StepRows) -> bool:
        """Always."""
        del rows
        return True

    def skips(self, rows: int) -> bool:
        """There are no dead rows."""
        del rows
        return False

    def launch(self, rows: StepRows) -> int:
        """The step begins now, or when the one before it ends."""
        self._launched += 1
        now = time.perf_counter()
        if self._launched > 1:
            self.idle += max(0.0, now - self._free)
        self._free = max(now, self._free) + self._seconds
        n = len(rows.logit_rows)
        ones = self._ones[n]
        record = StepRecord(self._launched, ones, self._tokens[n], self._zeros[n], ones, self._seconds)
        self._records.append((self._free, record))
        return self._launched

    def poll(self) -> StepRecord | None:
        """The oldest step's, when its time is over."""
        if not self._records or self._records[0][0] > time.perf_counter():
            return None
        return self._records.popleft()[1]

    @property
    def in_flight(self) -> int:
        """Steps launched and not yet polled."""
        return len(self._records)

    def step(self, batch: Batch) -> StepOutput:
        """Never asked for."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one step, in microseconds."""

    cpu: float
    wall: float
    idle: float
    """The device had nothing to run."""


def open_worker(streams: int, steps: int, depth: int, seconds: float) -> tuple[Worker, NoDevice]:
    """A worker with one model and nothing behind it."""
    context = PROMPT + steps
    runner = NoDevice(depth, context, streams, seconds)
    config = Config(models={"small": Model(path="small")})
    facts = ModelFacts(runner.vocab_size, runner.hidden_size, torch.device("cpu"))
    routes = build_routes(config, "small", facts, {"small": frozenset({0})})
    kv = KvCache(runner.num_pages, PAGE_SIZE, streams, context, prefix_cache=True)
    return Worker(0, routes, runner, kv, 512), runner


async def decode(streams: int, steps: int, depth: int, seconds: float, profile: cProfile.Profile | None) -> Cost:
    """All streams from their first token to their last."""
    worker, runner = open_worker(streams, steps, depth, seconds)
    segment = SharedSegment.create(RingSpec(ring_id=1, capacity=1 << 28))
    producer = RingProducer(segment, create_event(), create_event())

    def send(target: int, message: Message) -> bool:
        del target
        payload, kind = encode(message)
        return producer.try_push(payload, kind) is not PushResult.FULL

    worker.outbound.connect(send)
    loop = asyncio.create_task(worker.run())
    for rid in range(streams):
        sampling = Sampling(seed=rid, max_tokens=steps, temperature=1.0)
        worker.deliver(Submit(rid, "small", pack_ids([rid + 7] * PROMPT), sampling))
    await asyncio.sleep(0.05)
    first, idle = worker.stepper.steps, runner.idle
    began, cpu = time.perf_counter(), time.thread_time()
    if profile is not None:
        profile.enable()
    await worker.idle.wait()
    if profile is not None:
        profile.disable()
    cpu, wall = time.thread_time() - cpu, time.perf_counter() - began
    count = worker.stepper.steps - first
    worker.stop()
    await loop
    return Cost(cpu / count * 1e6, wall / count * 1e6, (runner.idle - idle) / count * 1e6)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="bench.decode_loop", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=8, metavar="N", help="requests in flight (%(default)s)")
    parser.add_argument("--steps", type=int, default=20_000, metavar="N", help="tokens of each request (%(default)s)")
    parser.add_argument("--depth", type=int, default=2, metavar="N", help="steps in flight (%(default)s)")
    parser.add_argument("--step-us", type=float, default=0.0, metavar="US", help="time of a step, microseconds (0)")
    parser.add_argument(
        "--repeats", type=int, default=5, metavar="N", help="runs, of which medians are shown (%(default)s)"
    )
    parser.add_argument("--profile", action="store_true", help="one run under cProfile, by own time")
    options = parser.parse_args()
    if options.profile:
        profile = cProfile.Profile()
        uvloop.run(decode(options.streams, options.steps, options.depth, options.step_us * 1e-6, profile))
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)
        return 0
    runs = [
        uvloop.run(decode(options.streams, options.steps, options.depth, options.step_us * 1e-6, None))
        for _ in range(options.repeats)
    ]
    cpu, wall, idle = (statistics.median(getattr(run, name) for run in runs) for name in ("cpu", "wall", "idle"))
    print(
        f"{options.streams} streams, depth {options.depth}, steps of {options.step_us:g} us: host CPU {cpu:.1f} us,"
        f" wall {wall:.1f} us, device idle {idle:.1f} us a step (medians of {len(runs)} runs; load {os.getloadavg()[0]:.1f})"
    )
    return 0


if __name__ == "__main__":
    run_command("bench.decode_loop", main)
