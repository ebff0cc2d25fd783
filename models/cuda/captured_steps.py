"""Steps on a CUDA device: one graph replay each where the step fits one, the same kernels one by one where not."""

from __future__ import annotations

import logging
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from models import device_routes
from models.batch import Batch, StepOutput
from models.cuda.captured_shapes import NO_SHAPE, Shape, Shapes
from models.cuda.graphs import GraphPool, borrowed
from models.cuda.inbox import MAX_CHANGES, entry_of
from models.cuda.step_kernels import StepKernels
from models.device_routes import RouteError, RouteInputs
from models.resident import DeviceRoute, StepRecord, StepRows
from models.rows import Accompanied, Planner, RowDecoder, Rows, Runs, Skipper
from models.slots import Int32Array, SlotTable

log = logging.getLogger(__name__)

_ENTRIES = 16
"""Turns that may be under way."""
_MOST_WHOLE = 3
"""Routes up to which each gets graphs of whole steps; batches of several routes always take graphs in parts."""
_TRIAL_ROWS = 2


@dataclass(slots=True)
class _ShapeGraphs:
    """Graphs of one shape. Whole steps: without routes and with one. In parts: up to the tokens, each route, the end."""

    plain: torch.cuda.CUDAGraph
    output: StepOutput
    """What `plain` computes, valid until anything else runs."""
    whole: dict[int, torch.cuda.CUDAGraph]
    first: torch.cuda.CUDAGraph | None
    parts: dict[int, torch.cuda.CUDAGraph]
    end: torch.cuda.CUDAGraph | None


class CudaSteps:
    """Runs steps over a RowDecoder on a CUDA device, all on the caller's current stream.

    Args:
        decoder: the model.
        slots: slot records and page table.
        buckets: token rows of captured steps, rising.
        extends: capture also steps with more token rows than logit rows.
    """

    def __init__(self, decoder: RowDecoder, slots: SlotTable, buckets: Sequence[int], *, extends: bool = True) -> None:
        self._decoder = decoder
        self._replaying = decoder.replaying if isinstance(decoder, Accompanied) else _unheard
        self._plans = decoder.plans if isinstance(decoder, Planner) else _never
        self._skips = decoder.skips if isinstance(decoder, Skipper) else _always_runs
        self._slots = slots
        self._device = decoder.device
        self._shapes = Shapes(buckets, extends=extends)
        rows, wanted = self._shapes.most
        wanted = max(wanted, slots.max_slots)
        self._kernels = StepKernels(slots, decoder.vocab_size, rows=rows, wanted=wanted, entries=_ENTRIES)
        self._routes: tuple[DeviceRoute, ...] = ()
        self._decided: tuple[int, ...] = ()
        self._graphs: dict[Shape, _ShapeGraphs] = {}
        self._pool = GraphPool(self._device)
        self._turn = 0
        """Turns begun."""
        self._open: deque[tuple[int, int]] = deque()
        """Step number and logit rows of turns whose records have not been read."""
        self.graph_bytes = 0

    def set_routes(self, routes: Sequence[DeviceRoute]) -> tuple[bool, ...]:
        """Try each route under capture; those that fail are left to the host. Graphs of earlier routes are dropped."""
        self._graphs.clear()
        self._routes = tuple(routes)
        self._kernels.set_routes(len(routes))
        works = tuple(self._works(route) for route in routes)
        self._decided = tuple(number for number, fine in enumerate(works) if fine)
        return works

    def _works(self, route: DeviceRoute) -> bool:
        config = self._decoder.config
        hidden = torch.zeros(_TRIAL_ROWS, config.hidden_size, dtype=self._decoder.dtype, device=self._device)
        output = StepOutput(torch.zeros(_TRIAL_ROWS, self._decoder.vocab_size, device=self._device), hidden)
        inputs = RouteInputs.empty(_TRIAL_ROWS, self._device)
        torch.cuda.synchronize(self._device)
        mode = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            # That it does not find every synchronisation: what matters is that it finds those of a route.
            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
            torch.cuda.set_sync_debug_mode("error")
        try:
            fine = device_routes.works(route, output, inputs)
        finally:
            torch.cuda.set_sync_debug_mode(mode)
        if not fine:
            return False
        try:
            GraphPool(self._device).capture(lambda: device_routes.ask(route, output, inputs))
        except (RouteError, RuntimeError) as error:
            log.warning("route '%s' is decided by the host: it cannot be captured: %s", route.name, error)
            return False
        return True

    def capture(self) -> None:
        """Capture the graphs of every shape, largest first."""
        torch.cuda.synchronize(self._device)
        self._graphs.clear()
        self._pool = GraphPool(self._device)
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(self._device)[0]
        with torch.inference_mode():
            self._rehearse()
            for shape in self._shapes.all:
                self._kernels.clear_rows()
                self._graphs[shape] = self._capture_shape(*shape)
        torch.cuda.synchronize(self._device)
        self.graph_bytes = max(0, free - torch.cuda.mem_get_info(self._device)[0])

    def _rehearse(self) -> None:
        """A step without rows, for kernels to be compiled and loaded outside captures."""
        none = np.zeros(0, np.int64)
        rows, runs = StepRows(none, none, none, none), Runs(none, none, none, none)
        self._kernels.inbox.write(self._turn, rows, runs, self._slots.take(), 0)
        self._turn += 1
        device_rows = self._kernels.rows(1, 1)
        self._kernels.take_in(device_rows)
        output = self._decoder.forward(device_rows)
        self._kernels.draw(device_rows, output.logits, ends=False)
        for number in self._decided:
            self._answer(number, output, 1)
        self._kernels.end(device_rows)
        self._kernels.fetch(1)
        torch.cuda.synchronize(self._device)

    def _capture_shape(self, total: int, wanted: int) -> _ShapeGraphs:
        kernels, pool = self._kernels, self._pool
        rows = kernels.rows(total, wanted)
        made: list[StepOutput] = []

        def begin() -> StepOutput:
            kernels.take_in(rows)
            made[:] = [self._decoder.forward(rows)]
            return made[0]

        def fetch() -> None:
            kernels.fetch(total)

        def plain() -> None:
            output = begin()
            with pool.beside(fetch):
                kernels.draw(rows, output.logits, ends=True)

        def whole(number: int) -> None:
            output = begin()
            with pool.beside(fetch):
                kernels.draw(rows, output.logits, ends=False)
                self._answer(number, output, wanted)
                kernels.end(rows)

        def first() -> None:
            output = begin()
            with pool.beside(fetch):
                kernels.draw(rows, output.logits, ends=False)

        pool.warm_up(lambda: self._decoder.forward(rows))
        graph = pool.capture(plain)
        graphs = _ShapeGraphs(graph, StepOutput(borrowed(made[0].logits), borrowed(made[0].hidden)), {}, None, {}, None)
        if len(self._decided) <= _MOST_WHOLE:
            graphs.whole = {number: pool.capture(partial(whole, number)) for number in self._decided}
        if len(self._decided) > 1:
            graphs.first = pool.capture(first)
            # Its output lives on in `made`, so that the next captures do not work in the same memory.
            answer = partial(self._answer, output=made[0], wanted=wanted)
            graphs.parts = {number: pool.capture(partial(answer, number)) for number in self._decided}
            graphs.end = pool.capture(partial(kernels.end, rows))
        return graphs

    def _answer(self, number: int, output: StepOutput, wanted: int) -> None:
        """Put a route's destinations where the step's end finds them."""
        inputs = self._kernels.route_inputs(number, wanted)
        self._kernels.answers[number, :wanted].copy_(device_routes.ask(self._routes[number], output, inputs))

    def quick(self, rows: StepRows, runs: Runs, routes: tuple[int, ...]) -> bool:
        """Whether the step is a replay of graphs."""
        graphs = self._graphs.get(self._shape(rows, runs))
        return graphs is not None and bool(self._replays(graphs, routes))

    def skips(self, rows: int) -> bool:
        """Whether a step of so many rows, all of which are decided, is over at once where all of them are inactive."""
        shape = self._shapes.of(rows, rows)
        return shape in self._graphs and self._skips(max(shape))

    def _shape(self, rows: StepRows, runs: Runs) -> Shape:
        """The shape whose graphs a step replays; one that has none where kernels that are launched one by one are faster."""
        return NO_SHAPE if self._plans(len(rows), runs) else self._shapes.of(len(rows), len(rows.logit_rows))

    def _replays(self, graphs: _ShapeGraphs, routes: tuple[int, ...]) -> list[torch.cuda.CUDAGraph]:
        """The graphs that make up a step; none when it was not captured."""
        if not routes:
            return [graphs.plain]
        if len(routes) == 1 and routes[0] in graphs.whole:
            return [graphs.whole[routes[0]]]
        if graphs.first is None or graphs.end is None:
            return [graphs.whole[number] for number in routes[:1] if number in graphs.whole]
        return [graphs.first, *(graphs.parts[number] for number in routes), graphs.end]

    def launch(self, number: int, rows: StepRows, runs: Runs, routes: tuple[int, ...]) -> None:
        """Queue step `number`. Raises RuntimeError when too many are in flight."""
        if len(self._open) >= _ENTRIES - 1:
            raise RuntimeError(
                f"{len(self._open)} steps in flight, at most {_ENTRIES - 1} can be: poll their records first"
            )
        shape = self._shape(rows, runs)
        graphs = self._graphs.get(shape)
        replays = self._replays(graphs, routes) if graphs is not None else []
        if replays:
            self._replay(shape, replays, rows, runs, len(rows.logit_rows))
        else:
            self._launch_plainly(rows, runs, routes)
        self._turn += 1
        self._open.append((number, len(rows.logit_rows)))

    def _replay(
        self, shape: Shape, graphs: list[torch.cuda.CUDAGraph], rows: StepRows, runs: Runs, decided: int
    ) -> None:
        changes = self._changes()
        try:
            self._kernels.inbox.write(self._turn, rows, runs, changes, decided)
            self._replaying(*shape)
            for graph in graphs:
                graph.replay()
        except BaseException:
            # The next launch takes the same turn.
            self._kernels.forget()
            raise

    def _changes(self) -> Int32Array:
        """Pending changes for the inbox; more than it holds go ahead at once."""
        changes = self._slots.take()
        if changes.shape[1] <= MAX_CHANGES:
            return changes
        index, values = self._send(changes)
        self._slots.cells.index_copy_(0, index.long(), values)
        return changes[:, :0]

    def _send(self, words: Int32Array) -> torch.Tensor:
        """Words on the device, copied in stream order."""
        pinned = torch.empty(words.shape, dtype=torch.int32, pin_memory=True)
        pinned.numpy()[:] = words
        return pinned.to(self._device, non_blocking=True)

    @torch.inference_mode()
    def _launch_plainly(self, rows: StepRows, runs: Runs, routes: tuple[int, ...]) -> None:
        kernels, wanted = self._kernels, len(rows.logit_rows)
        device_rows = self._placed(rows, runs, wanted)
        output = self._decoder.forward(device_rows, runs)
        if wanted:
            kernels.draw(device_rows, output.logits, ends=not routes)
        for number in routes:
            try:
                self._answer(number, output, wanted)
            except RouteError:
                log.exception("a routing function failed: its requests of this step end with an error")
                kernels.answers[number, :wanted].fill_(device_routes.FAILED)
        if routes or not wanted:
            kernels.end(device_rows)

    def _placed(self, rows: StepRows, runs: Runs, decided: int) -> Rows:
        """The rows on the device, at an address of their own."""
        device_rows = self._kernels.fresh_rows(len(rows), len(rows.logit_rows))
        self._kernels.take_in(device_rows, self._send(entry_of(rows, runs, self._slots.take(), decided)))
        return device_rows

    def poll(self) -> StepRecord | None:
        """The record of the oldest step in flight, if it is there."""
        number, count = self._open[0]
        record = self._kernels.records.read(self._turn - len(self._open), number, count)
        if record is not None:
            self._open.popleft()
        return record

    def step(self, batch: Batch, runs: Runs) -> StepOutput:
        """A forward pass that leaves the slot records alone; nothing may be in flight."""
        rows = StepRows(batch.slots, batch.tokens, batch.positions, batch.logit_rows)
        count = len(batch.logit_rows)
        shape = self._shape(rows, runs)
        graphs = self._graphs.get(shape)
        if graphs is None:
            with torch.inference_mode():
                output = self._decoder.forward(self._placed(rows, runs, 0), runs)
        else:
            self._replay(shape, [graphs.plain], rows, runs, 0)
            self._turn += 1
            output = StepOutput(graphs.output.logits[:count], graphs.output.hidden[:count])
        torch.cuda.current_stream(self._device).synchronize()
        return output


def _unheard(_rows: int, _logit_rows: int) -> None:
    """Nobody follows."""


def _always_runs(_rows: int) -> bool:
    """A step without an active row takes as long as others."""
    return False


def _never(_rows: int, _runs: Runs) -> bool:
    """A step is the same with runs as without."""
    return False
