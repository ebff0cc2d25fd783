"""A model on a GPU between its weights and its KV pool: measured with a small pool first, then opened with the agreed one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from models.batch import ModelRunner
from models.config import ModelError
from models.device_runner import DeviceRunner
from models.kv_cache import KvCache
from models.rows import RowDecoder
from models.sampler import sample
from trouterd.config import Model
from trouterd.memory import Claim, Footprint, Memory, gib
from trouterd.worker.trial_step import TrialStep, first_steps, largest_steps

_POLL = 1e-3
Prepare = Callable[[ModelRunner], None]
"""Gives a runner what it decodes with, such as the routes that its graphs take in."""


class Meter(Protocol):
    """`models.memory.DeviceMemory`, or of a split model `models.parallel.split_memory.SplitMemory`."""

    def held(self) -> int: ...
    def start_peak(self) -> None: ...
    def peak(self) -> int: ...
    def free_and_total(self) -> tuple[int, int]: ...
    def every_device(self) -> list[tuple[int, int]]: ...


class Weights(Protocol):
    """A model that is loaded and can be given KV pools of different sizes."""

    page_bytes: int
    """Of K and V on one GPU."""

    def runner(self, num_pages: int, max_slots: int, max_pages: int) -> ModelRunner:
        """A runner over a new pool, which takes the place of the one before."""
        ...

    def capture(self, runner: ModelRunner) -> None:
        """Capture the runner's graphs, if it has any."""
        ...

    def exercise(self, runner: ModelRunner, step: TrialStep) -> None:
        """Run a step and wait for its end."""
        ...

    def release(self) -> None:
        """Give the pool back."""
        ...


class TorchWeights:
    """A model of one of the plain torch runners, which hold their pool themselves."""

    def __init__(self, runner: PooledRunner, page_bytes: int) -> None:
        self._runner = runner
        self.page_bytes = page_bytes

    def runner(self, num_pages: int, max_slots: int, max_pages: int) -> ModelRunner:
        """The same runner with another pool."""
        del max_slots, max_pages
        self._runner.allocate_kv(num_pages)
        return self._runner

    def capture(self, runner: ModelRunner) -> None:
        """There is nothing to capture."""

    def exercise(self, runner: ModelRunner, step: TrialStep) -> None:
        """A forward pass, and sampling."""
        output = runner.step(step.batch())
        sample(output.logits, step.sampling())

    def release(self) -> None:
        """One page is the least that a pool has."""
        self._runner.allocate_kv(1)


class PooledRunner(ModelRunner, Protocol):
    """A runner whose KV pool can be replaced."""

    def allocate_kv(self, num_pages: int) -> None: ...


class PooledDecoder(RowDecoder, Protocol):
    """`models.cuda.decoder.CudaDecoder` or, over several GPUs, `models.parallel.leader.LeadingDecoder`: a row decoder whose KV pool
    can be replaced."""

    @property
    def kv_bytes_per_page(self) -> int: ...
    def allocate_kv(self, num_pages: int) -> None: ...


class FastSteps(Protocol):
    """`models.cuda.fast_steps.FastSteps`: another way of the decoder's small steps, over the KV pool that it has."""

    def attach(self) -> None: ...
    def detach(self) -> None: ...


class DecoderWeights:
    """A model of our own CUDA decoder, decoded on the device."""

    def __init__(self, decoder: PooledDecoder, model: Model, fast: FastSteps | None = None) -> None:
        self._decoder = decoder
        self._fast = fast
        self._depth = model.depth
        self._graphs = model.graphs
        self._extend_graphs = model.extend_graphs
        self.page_bytes = decoder.kv_bytes_per_page

    def runner(self, num_pages: int, max_slots: int, max_pages: int) -> ModelRunner:
        """A runner with its own slots and graphs."""
        self._allocate(num_pages)
        if self._fast is not None:
            self._fast.attach()
        return DeviceRunner(
            self._decoder,
            max_slots=max_slots,
            max_pages=max_pages,
            depth=self._depth,
            extend_graphs=self._extend_graphs,
        )

    def capture(self, runner: ModelRunner) -> None:
        """Capture its graphs unless models.X.graphs is false."""
        if self._graphs and isinstance(runner, DeviceRunner):
            runner.capture()

    def exercise(self, runner: ModelRunner, step: TrialStep) -> None:
        """Forward passes with all that follows them on the device, until each of the runner's routes has decided a row."""
        if not isinstance(runner, DeviceRunner):
            return
        for setups in step.rounds(runner.routes):
            for setup, pages in zip(setups, step.pages, strict=True):
                runner.setup(setup)
                runner.set_pages(setup.slot, 0, range(pages))
            runner.launch(step.rows())
            while runner.poll() is None:
                time.sleep(_POLL)

    def release(self) -> None:
        """No pages."""
        self._allocate(0)

    def _allocate(self, num_pages: int) -> None:
        if self._fast is not None:
            self._fast.detach()
        self._decoder.allocate_kv(num_pages)


@dataclass(frozen=True, slots=True)
class GpuEngine:
    """A loaded model on its GPUs, before the models of these have agreed on their KV pools."""

    name: str
    model: Model
    weights: Weights
    context: int
    """Longest prompt + output, tokens."""
    meter: Meter

    def memory(self) -> Mapping[int, Memory]:
        """The model's GPUs now."""
        found = zip(self.model.gpus, self.meter.every_device(), strict=True)
        return {gpu: Memory(total=total, free=free) for gpu, (free, total) in found}

    def measure(self, prepare: Prepare) -> Claim:
        """What the model takes, found out with a pool of one context: the first steps are run, graphs are captured, the largest
        steps run. Everything but the weights is given back; kernels that were compiled stay.

        Raises:
            ModelError: not even that fits.
        """
        model, weights, meter = self.model, self.weights, self.meter
        pages = -(-self.context // model.page_size)
        with _short_of_memory(f"models.{self.name}.context_length", f"one context of {self.context} tokens", meter):
            meter.held()
            meter.start_peak()
            runner = weights.runner(pages, model.max_requests, pages)
            prepare(runner)
            # Later some of them would be replayed, and what such a step needs outside graphs would not be there.
            for step in first_steps(model, self.context):
                weights.exercise(runner, step)
            before = meter.held()
            weights.capture(runner)
            # By this process's own allocator: what is free on the GPU changes with the other models that are being loaded.
            graphs = meter.held() - before
            for step in largest_steps(model, self.context):
                weights.exercise(runner, step)
            peak = meter.peak()
        del runner
        weights.release()
        held = meter.held()
        return Claim(
            footprint=Footprint(
                weights=held,
                graphs=graphs,
                workspace=max(peak - held - graphs - pages * weights.page_bytes, 0),
                kv_bytes_per_token=-(-weights.page_bytes // model.page_size),
            ),
            page_size=model.page_size,
            context=self.context,
            most=model.max_requests * self.context,
            fixed_tokens=model.kv_tokens,
        )

    def open(self, tokens: int) -> tuple[ModelRunner, KvCache]:
        """The model with a KV pool of this many tokens; its graphs are not captured yet.

        Raises:
            ModelError: the memory is not there any more.
        """
        model = self.model
        pages = tokens // model.page_size
        kv = KvCache(pages, model.page_size, model.max_requests, self.context, model.prefix_cache)
        with _short_of_memory("gpu.memory_fraction", f"a KV pool of {tokens} tokens", self.meter):
            return self.weights.runner(pages, *kv.page_table.shape), kv

    def capture(self, runner: ModelRunner) -> None:
        """Run a step on an opened model that knows its routes, and capture its graphs. To be called in the thread that will run
        steps: libraries have handles for each thread, made when it first calls them.

        Raises:
            ModelError: the memory is not there any more.
        """
        with _short_of_memory("gpu.memory_fraction", "CUDA graphs", self.meter):
            self.weights.exercise(runner, next(first_steps(self.model, self.context)))
            self.weights.capture(runner)


@contextmanager
def _short_of_memory(key: str, what: str, meter: Meter) -> Iterator[None]:
    """Turn torch's error into one line that says what to do."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        free, total = meter.free_and_total()
        raise ModelError(
            f"{key}: no memory for {what} beside the weights: {gib(free)} of {gib(total)} are free; lower context_length,"
            " max_batch_tokens or max_requests, or end what else runs on the GPU"
        ) from error
