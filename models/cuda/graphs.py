"""CUDA graphs that share one memory pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch


class GraphPool:
    """Captures functions on a stream of its own and owns the memory that their replays work in.

    Replays must follow one another on one stream: what a capture has allocated and let go is used again by the next one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._branch = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, work: Callable[[], object]) -> None:
        """Run `work` once where captures happen, so that nothing is compiled or tuned inside one."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            work()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def capture(self, work: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """A graph of what `work` enqueues.

        Raises:
            Exception: whatever `work` raises, or RuntimeError for what cannot be captured; the device can be used on.
        """
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._device)
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                self._abandon(graph)
                raise
            try:
                graph.capture_end()
            except RuntimeError:
                self._release()
                raise
        return graph

    @contextmanager
    def beside(self, work: Callable[[], object]) -> Iterator[None]:
        """Enqueue `work`, which allocates nothing, on a branch of its own beside what is enqueued inside."""
        stream = torch.cuda.current_stream(self._device)
        self._branch.wait_stream(stream)
        with torch.cuda.stream(self._branch):
            work()
        try:
            yield
        finally:
            stream.wait_stream(self._branch)

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        try:
            graph.capture_end()
        except RuntimeError:
            # The capture was broken already; the allocator must still be told that it is over.
            self._release()

    def _release(self) -> None:
        # Versions of torch that end the allocation before they notice the failure refuse a second time.
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(self._device.index or 0, self._pool)  # noqa: SLF001  (no public form)


def borrowed(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory without a share in its ownership: for outputs of graphs, which the pool uses again."""
    words = tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor
    return torch.as_tensor(_Span(words), device=tensor.device).view(tensor.dtype)


class _Span:
    """Memory by address, in the form that `torch.as_tensor` takes without a copy."""

    def __init__(self, tensor: torch.Tensor) -> None:
        kinds = {torch.float32: "<f4", torch.float16: "<f2", torch.int16: "<i2"}
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": kinds[tensor.dtype],
            "data": (tensor.data_ptr(), False),
            "strides": tuple(stride * tensor.element_size() for stride in tensor.stride()),
            "version": 3,
        }
