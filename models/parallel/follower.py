"""A rank other than the first: runs its part of every step as it is told."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from models.config import ModelError
from models.cuda.graphs import GraphPool
from models.parallel.exchange import packed_size, unpack_rows, unpack_runs
from models.parallel.group import Group
from models.parallel.link import (
    Allocate,
    Answer,
    Capture,
    Done,
    Join,
    Layout,
    Link,
    Load,
    Loaded,
    Look,
    Order,
    Refused,
    Replay,
    Step,
)
from models.parallel.part import Loader, Part, allocate, load_part
from models.parallel.split_memory import look
from models.rows import Runs


class Follower:
    """Serves one link.

    Args:
        link: to the first rank.
        load: loads this rank's part.
    """

    def __init__(self, link: Link, load: Loader = load_part) -> None:
        self._link = link
        self._load = load
        self._group: Group
        self._part: Part
        self._stream: torch.cuda.Stream | None = None
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        """By rows and logit rows."""
        self._pool: GraphPool | None = None

    def serve(self) -> None:
        """Do what the first rank says until it hangs up.

        Raises:
            LinkError: it says what cannot be understood.
            RuntimeError: a step failed; the ranks are out of step.
        """
        with torch.inference_mode():
            while (order := self._link.order()) is not None:
                with self._on_stream():
                    self._obey(order)

    def _obey(self, order: Order) -> None:
        match order:
            case Step():
                self._forward(order.layout, unpack_runs(order.runs))
            case Replay():
                self._graphs[order.rows, order.logit_rows].replay()
            case Capture():
                self._capture(order.layout)
            case _:
                self._link.send(self._answer(order))

    def _answer(self, order: Load | Join | Allocate | Look) -> Answer:
        try:
            match order:
                case Load():
                    return self._loaded(order)
                case Join():
                    self._group.join(order.store_fd, self._part.config.hidden_size, self._part.dtype)
                case Allocate():
                    self._graphs.clear()
                    self._pool = None
                    allocate(self._part, order.pages)
                case Look():
                    return look(self._part.device, order)
        except ModelError as error:
            return Refused(message=str(error))
        return Done()

    def _loaded(self, order: Load) -> Loaded:
        device = torch.device(order.device)
        self._group = Group(order.rank, order.world, device)
        self._part = self._load(order, self._group.shard())
        if device.type == "cuda":
            torch.cuda.set_device(device)
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return Loaded(weight_bytes=self._part.weight_bytes, kv_bytes_per_page=self._part.kv_bytes_per_page)

    def _forward(self, layout: Layout, runs: Runs | None) -> None:
        packed = torch.empty(packed_size(layout), dtype=torch.int32, device=self._part.device)
        self._group.broadcast(packed)
        self._part.forward(unpack_rows(packed, layout), runs)

    def _capture(self, layout: Layout) -> None:
        key = layout.rows, layout.logit_rows
        if key in self._graphs:
            return
        if self._pool is None:
            self._pool = GraphPool(self._part.device)
        self._graphs[key] = self._pool.capture(lambda: self._forward(layout, None))

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        if self._stream is None:
            yield
        else:
            with torch.cuda.stream(self._stream):
                yield
