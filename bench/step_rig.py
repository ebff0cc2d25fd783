"""Drives a `Resident` through steps of chosen shapes and times them.

Contexts are not computed: a request starts at any position over pages that hold zeros, which costs attention the same.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from models.batch import IntArray
from models.resident import NO_ROUTE, OWN_TOKEN, Resident, SlotSetup, StepRecord, StepRows

_ENDLESS = 1 << 30
_WARM_UP = 10
_LEAST_STEPS = 20
_LEAST_ENDED = 2
_WINDOWS = 10
"""Steps are timed in this many groups, of which the median counts: one record may be read late, with the next one."""
_TOKEN = 1
_PREFILL_ROWS = 2048
"""Rows of one step while prompts are fed."""


class TooLargeError(Exception):
    """The KV pool, the slots or the context length cannot hold a case; the message says which."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Of one case."""

    steps: int
    wall_ms: float
    """Per step, with `depth` of them in flight; median over groups of steps."""
    worst_ms: float
    """99th percentile between two records."""
    device_ms: float
    """Median of what the device says of a step."""
    launch_us: float
    """Median host time of `launch`."""
    poll_us: float
    """Median host time of a `poll` that yields a record."""


class Rig:
    """Cases over one runner.

    Args:
        runner: with its routes set and its graphs captured; nothing in flight.
        max_slots: slots that it has.
        route: what requests are routed by, or NO_ROUTE.
        params: of that route.
        temperature: 0 = greedy.
        seconds: how long a case is timed, roughly.
        most_steps: and with at most how many steps.
    """

    def __init__(
        self,
        runner: Resident,
        *,
        max_slots: int,
        route: int = NO_ROUTE,
        params: tuple[float, ...] = (),
        temperature: float = 0.0,
        seconds: float = 1.0,
        most_steps: int = 200,
    ) -> None:
        self._runner = runner
        self._max_slots = max_slots
        self._route = route
        self._params = params
        self._temperature = temperature
        self._seconds = seconds
        self._most_steps = most_steps
        # As after a while of serving: neighbours in a request are not neighbours in memory.
        self._pages = np.random.default_rng(0).permutation(runner.num_pages)

    def decode(self, batch: int, context: int) -> Timing:
        """Steps of one row per request, whose positions pass `context` half-way. Raises TooLargeError."""
        start = max(0, context - self._most_steps // 2)
        self._open(batch, start, start + _WARM_UP + self._most_steps + 1)
        slots = np.arange(batch)
        self._run(StepRows(slots, np.full(batch, _TOKEN), np.full(batch, start), slots))
        own = StepRows(slots, np.full(batch, OWN_TOKEN), np.zeros(batch, np.int64), slots)
        return self._timing(lambda: own)

    def extend(self, batch: int, count: int, context: int) -> Timing:
        """Steps of `count` new rows per request from `context` on. Raises TooLargeError."""
        rows = self._runs(batch, context, count)
        self._open(batch, context, context + count)
        return self._timing(lambda: rows)

    def prefill(self, count: int) -> Timing:
        """Steps of one prompt of `count` tokens, all its rows at once. Raises TooLargeError."""
        return self.extend(1, count, 0)

    def generate(self, batch: int, prompt: int, output: int) -> tuple[Timing, float]:
        """A batch of answers from their prompts on: the steps after the first token, and the time to that one, ms.

        Raises:
            TooLargeError: no room.
        """
        self._open(batch, prompt - 1, prompt + output)
        slots = np.arange(batch)
        own = StepRows(slots, np.full(batch, OWN_TOKEN), np.zeros(batch, np.int64), slots)
        started = time.perf_counter()
        for first in range(0, batch, max(1, _PREFILL_ROWS // prompt)):
            part = slots[first : first + max(1, _PREFILL_ROWS // prompt)]
            self._run(self._runs(len(part), 0, prompt, first))
        prompts = 1e3 * (time.perf_counter() - started)
        return self._measured(lambda: own, output - 1), prompts

    def repeat(self, batch: int, count: int, context: int, steps: int) -> None:
        """Run steps of `count` new rows per request from `context` on, untimed: for a profiler. Raises TooLargeError."""
        rows = self._runs(batch, context, count)
        self._open(batch, context, context + count)
        self._measured(lambda: rows, steps)

    def during(self, batch: int, count: int, context: int, begin: float, end: float) -> list[float]:
        """Steps of `count` new rows per request from `context` on, one behind the other until `end`; two at least.

        Args:
            batch: requests.
            count: rows of each.
            context: tokens before them.
            begin: on the monotonic clock.
            end: likewise.

        Returns:
            Seconds of each step that began and ended in between.

        Raises:
            TooLargeError: no room.
        """
        rows = self._runs(batch, context, count)
        self._open(batch, context, context + count)
        runner = self._runner
        seen: list[float] = []
        while len(seen) < _LEAST_ENDED or seen[-1] < end:
            while runner.in_flight < runner.depth:
                runner.launch(rows)
            if runner.poll() is not None:
                seen.append(time.monotonic())
        while runner.in_flight:
            runner.poll()
        return [after - before for before, after in pairwise(seen) if begin <= before and after <= end]

    def _runs(self, batch: int, start: int, count: int, first_slot: int = 0) -> StepRows:
        """`count` given tokens for each of `batch` slots."""
        slots: IntArray = np.repeat(np.arange(first_slot, first_slot + batch), count)
        positions: IntArray = np.tile(np.arange(start, start + count), batch)
        return StepRows(slots, np.full(len(slots), _TOKEN), positions, np.arange(1, batch + 1) * count - 1)

    def _open(self, batch: int, prompt: int, tokens: int) -> None:
        """Give `batch` slots pages for `tokens` each; output begins after position `prompt`."""
        runner = self._runner
        if batch > self._max_slots:
            raise TooLargeError(f"{batch} requests, but there are {self._max_slots} slots")
        if tokens > runner.context_length:
            raise TooLargeError(f"{tokens} tokens, but the context length is {runner.context_length}")
        each = -(-tokens // runner.page_size)
        if batch * each > runner.num_pages:
            raise TooLargeError(
                f"{batch * each * runner.page_size:,} tokens of KV, but the pool holds"
                f" {runner.num_pages * runner.page_size:,}"
            )
        for slot in range(batch):
            runner.setup(self._setup(slot, prompt + 1))
            runner.set_pages(slot, 0, self._pages[slot * each : (slot + 1) * each].tolist())

    def _setup(self, slot: int, prompt_length: int) -> SlotSetup:
        return SlotSetup(
            slot=slot,
            prompt_length=prompt_length,
            max_tokens=_ENDLESS,
            # The stop id is looked for, and banned so that it is never found.
            min_tokens=_ENDLESS,
            stop_ids=(0,),
            temperature=self._temperature,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            seed=slot,
            choice=0,
            route=self._route,
            routable=True,
            params=self._params,
        )

    def _run(self, rows: StepRows) -> StepRecord:
        """One step on its own."""
        self._runner.launch(rows)
        while (record := self._runner.poll()) is None:
            pass
        return record

    def _timing(self, rows: Callable[[], StepRows]) -> Timing:
        """Warm up, choose a number of steps that takes about as long as it should, time them."""
        step = self._measured(rows, _WARM_UP).wall_ms
        return self._measured(rows, max(_LEAST_STEPS, min(self._most_steps, int(1e3 * self._seconds / step))))

    def _measured(self, rows: Callable[[], StepRows], steps: int) -> Timing:
        runner, clock = self._runner, time.perf_counter
        seen = [clock()]
        device: list[float] = []
        launches: list[float] = []
        polls: list[float] = []
        launched = 0
        while len(device) < steps:
            while runner.in_flight < runner.depth and launched < steps:
                before = clock()
                runner.launch(rows())
                launches.append(clock() - before)
                launched += 1
            before = clock()
            record = runner.poll()
            if record is None:
                continue
            now = clock()
            polls.append(now - before)
            seen.append(now)
            device.append(record.seconds)
            if not (record.alive.all() and record.stays.all()):
                raise RuntimeError(f"step {record.step}: requests ended that should not have")
        gaps = np.diff(seen)
        windows = np.array_split(gaps, min(_WINDOWS, len(gaps)))
        return Timing(
            steps=steps,
            wall_ms=1e3 * statistics.median(float(window.mean()) for window in windows),
            worst_ms=1e3 * float(np.percentile(gaps, 99)),
            device_ms=1e3 * statistics.median(device),
            launch_us=1e6 * statistics.median(launches),
            poll_us=1e6 * statistics.median(polls),
        )
