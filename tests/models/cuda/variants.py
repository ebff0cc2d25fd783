"""The CUDA decoder and its steps without a GPU, to see which variants of the Triton kernels they would have compiled.

Launches go through Triton's own specialisation of arguments; nothing is compiled and nothing runs, so that what comes out of a step
means nothing. Addresses are aligned like those of a GPU's allocator as far as kernels care: by 64 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from models import device_runner
from models.cuda import captured_steps, decoder, record_ring, router_head
from models.cuda.step_kernels import StepKernels
from models.resident import StepRecord

Variants = set[tuple[str, str]]
"""Kernel, and the key by which Triton keeps what it has compiled."""


class _Driver:
    """A GPU as far as keys depend on it."""

    def get_current_device(self) -> str:
        return "none"

    def get_current_stream(self, device: str) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class _Graph:
    def replay(self) -> None: ...


class _Pool:
    """`GraphPool`: work is launched when it is captured, and not again."""

    def __init__(self, device: torch.device) -> None: ...

    def warm_up(self, work: Callable[[], object]) -> None:
        work()

    def capture(self, work: Callable[[], object]) -> _Graph:
        work()
        return _Graph()

    @contextmanager
    def beside(self, work: Callable[[], object]) -> Iterator[None]:
        work()
        yield


class _Ragged:
    """`RaggedPrefill`, which is one variant."""

    variants: Variants

    def __init__(self, *_: object) -> None: ...

    def plan(self, *_: object) -> None:
        self.variants.add(("FlashInfer", ""))

    def attend(self, *_: object) -> None: ...


def _read(ring: record_ring.RecordRing, turn: int, number: int, count: int) -> StepRecord:
    none = np.zeros(count, np.int32)
    return StepRecord(number, none == 0, none, none, none == 0, 0.0)


def watch(patch: pytest.MonkeyPatch) -> Variants:
    """Have everything that follows launch nothing; the result grows with what would be compiled."""
    seen: Variants = set()

    def note(*, key: str, fn: Any, **_: object) -> bool:
        seen.add((fn.name, str(key)))
        return True

    patch.setattr(driver, "_active", _Driver())
    patch.setattr(knobs.runtime, "jit_cache_hook", note)
    for name, value in {"get_sync_debug_mode": 0, "mem_get_info": (0, 0)}.items():
        patch.setattr(torch.cuda, name, lambda *_, value=value: value)
    for name in ("set_sync_debug_mode", "synchronize", "empty_cache"):
        patch.setattr(torch.cuda, name, lambda *_: None)
    patch.setattr(captured_steps, "GraphPool", _Pool)
    patch.setattr(captured_steps, "StepKernels", partial(StepKernels, on_device=False))
    patch.setattr(captured_steps, "borrowed", lambda tensor: tensor)
    patch.setattr(captured_steps.CudaSteps, "_send", lambda _, words: torch.from_numpy(words.astype(np.int32)))
    patch.setattr(record_ring.RecordRing, "read", _read)
    patch.setattr(device_runner, "_steps", lambda d, s, buckets, e: captured_steps.CudaSteps(d, s, buckets, extends=e))
    patch.setattr(decoder, "check_device", lambda _: None)
    patch.setattr(decoder, "RaggedPrefill", type("Ragged", (_Ragged,), {"variants": seen}))
    patch.setattr(decoder.CudaDecoder, "_has_ragged", lambda _: True)
    # The CPU has no products of bfloat16 that give float32.
    patch.setattr(
        decoder.CudaDecoder, "_logits", lambda d, hidden: (hidden @ d.weights.head.t()).float()[:, : d.vocab_size]
    )
    patch.setattr(router_head, "_runs_on", lambda _: True)
    return seen
