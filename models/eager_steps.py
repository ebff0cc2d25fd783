"""Steps on a CPU: what a device does in a captured graph, done at once with torch and numpy on the same slot records."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from models import device_routes
from models.batch import Batch, IntArray, StepOutput
from models.device_routes import RouteInputs
from models.resident import NO_ROUTE, OWN_TOKEN, DeviceRoute, StepRecord, StepRows
from models.rows import RowDecoder, Rows, Runs
from models.sampler import Edits, SamplingRows, sample
from models.slots import MAX_PARAMS, Field, Int32Array, SlotTable

_TRIAL_ROWS = 2


class EagerSteps:
    """Runs steps over a RowDecoder on a CPU; a step is over when `launch` returns."""

    def __init__(self, decoder: RowDecoder, slots: SlotTable) -> None:
        self._decoder = decoder
        self._slots = slots
        self._cells: Int32Array = slots.cells.numpy()
        self._slot_records = slots.records.numpy()
        self._routes: tuple[DeviceRoute, ...] = ()
        self._finished: deque[StepRecord] = deque()

    graph_bytes = 0

    def capture(self) -> None:
        """Nothing is captured on a CPU."""

    def set_routes(self, routes: Sequence[DeviceRoute]) -> tuple[bool, ...]:
        """Try each route on made-up rows; those that fail there are left to the host."""
        self._routes = tuple(routes)
        config = self._decoder.config
        output = StepOutput(
            torch.zeros(_TRIAL_ROWS, self._decoder.vocab_size),
            torch.zeros(_TRIAL_ROWS, config.hidden_size, dtype=self._decoder.dtype),
        )
        inputs = RouteInputs.empty(_TRIAL_ROWS, self._decoder.device)
        return tuple(device_routes.works(route, output, inputs) for route in routes)

    def quick(self, rows: StepRows, runs: Runs, routes: tuple[int, ...]) -> bool:
        """A forward pass on a CPU takes milliseconds."""
        del rows, runs, routes
        return False

    def skips(self, rows: int) -> bool:
        """A step is over when it has been launched, so that none is queued for nothing."""
        del rows
        return False

    def launch(self, number: int, rows: StepRows, runs: Runs, routes: tuple[int, ...]) -> None:
        """Run step `number`; `routes` are those of its logit rows that are decided here."""
        started = time.perf_counter()
        with torch.inference_mode():
            self._update()
            fed = self._fed(rows, runs)
            output = self._decoder.forward(fed, runs)
            record = self._decide(number, rows, fed.positions.numpy(), output, routes)
        record.seconds = time.perf_counter() - started
        self._finished.append(record)

    def poll(self) -> StepRecord | None:
        """The record of the oldest step that has not been asked for."""
        return self._finished.popleft() if self._finished else None

    def step(self, batch: Batch, runs: Runs) -> StepOutput:
        """A forward pass that leaves the slot records alone."""
        with torch.inference_mode():
            self._update()
            return self._decoder.forward(
                Rows(
                    tokens=_tensor(batch.tokens),
                    positions=_tensor(batch.positions),
                    slots=_tensor(batch.slots),
                    leaders=_tensor(leaders(runs)),
                    counts=_tensor(counts(runs)),
                    page_table=self._slots.page_table,
                    logit_rows=_tensor(batch.logit_rows),
                ),
                runs,
            )

    def _update(self) -> None:
        index, values = self._slots.take()
        self._cells[index] = values

    def _fed(self, rows: StepRows, runs: Runs) -> Rows:
        """The rows as they lie on the device: own tokens filled in, rows of slots that have left inactive."""
        state = self._slot_records
        own = rows.tokens == OWN_TOKEN
        positions = np.where(own, state[rows.slots, Field.POSITION], rows.positions)
        positions[own & (state[rows.slots, Field.ACTIVE] == 0)] = -1
        return Rows(
            tokens=_tensor(np.where(own, state[rows.slots, Field.TOKEN], rows.tokens)),
            positions=_tensor(positions),
            slots=_tensor(rows.slots),
            leaders=_tensor(leaders(runs)),
            counts=_tensor(counts(runs)),
            page_table=self._slots.page_table,
            logit_rows=_tensor(rows.logit_rows),
        )

    def _decide(
        self, number: int, rows: StepRows, positions: Int32Array, output: StepOutput, routes: tuple[int, ...]
    ) -> StepRecord:
        """Sample, route, test for the end and advance the slots of the logit rows."""
        slots = rows.slots[rows.logit_rows]
        positions = positions[rows.logit_rows]
        state = self._slot_records[slots]
        alive = positions >= 0
        index = np.where(alive, positions + 1 - state[:, Field.PROMPT_LENGTH], 0).astype(np.int64)
        tokens = _sampled(output.logits, state, index, alive)
        destinations = np.zeros(len(slots), np.int32)
        if routes:
            inputs = _route_inputs(state, tokens, index, alive)
            destinations = device_routes.destinations(self._routes, routes, output, inputs).numpy()
        stop_ids = state[:, Field.STOP_IDS :]
        named = np.arange(stop_ids.shape[1]) < state[:, Field.STOP_COUNT, None]
        stopped = ((stop_ids == tokens[:, None]) & named).any(axis=1)
        stays = alive & (destinations == 0) & ~stopped & (index + 1 < state[:, Field.MAX_TOKENS])
        fed = slots[alive]
        self._slot_records[fed, Field.TOKEN] = tokens[alive]
        self._slot_records[fed, Field.POSITION] = positions[alive] + 1
        self._slot_records[fed, Field.ACTIVE] = stays[alive]
        self._slot_records[fed, Field.ROUTABLE] |= stays[alive]
        return StepRecord(number, alive, tokens.astype(np.int32), destinations, stays, 0.0)


def leaders(runs: Runs) -> IntArray:
    """[T] index of the first row of each row's run."""
    return np.repeat(runs.firsts, runs.counts)


def counts(runs: Runs) -> IntArray:
    """[T] rows of the run at its first row, 0 at the others."""
    result = np.zeros(int(runs.counts.sum()), np.int64)
    result[runs.firsts] = runs.counts
    return result


def _tensor(values: IntArray) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int32))


def _floats(state: Int32Array, field: int, count: int = 1) -> npt.NDArray[np.float32]:
    """[R, count] words of the records as float32."""
    return np.ascontiguousarray(state[:, field : field + count]).view(np.float32)


def _seeds(state: Int32Array) -> npt.NDArray[np.uint64]:
    return np.ascontiguousarray(state[:, Field.SEED_LOW : Field.SEED_HIGH + 1]).view(np.uint64)[:, 0]


def _sampled(
    logits: torch.Tensor, state: Int32Array, index: IntArray, alive: npt.NDArray[np.bool_]
) -> npt.NDArray[np.int64]:
    """[R] tokens of the rows that are alive, 0 of the others."""
    tokens = np.zeros(len(state), np.int64)
    pick = np.flatnonzero(alive)
    if len(pick):
        tokens[pick] = sample(logits[torch.from_numpy(pick)], _sampling_rows(state[pick], index[pick])).numpy()
    return tokens


def _sampling_rows(state: Int32Array, index: IntArray) -> SamplingRows:
    rows = SamplingRows(
        temperature=_floats(state, Field.TEMPERATURE)[:, 0],
        top_k=state[:, Field.TOP_K].astype(np.int64),
        top_p=_floats(state, Field.TOP_P)[:, 0],
        min_p=_floats(state, Field.MIN_P)[:, 0],
        seed=_seeds(state),
        choice=state[:, Field.CHOICE].astype(np.int64),
        output_index=index,
    )
    named = np.arange(state.shape[1] - Field.STOP_IDS) < state[:, Field.STOP_COUNT, None]
    banned = np.nonzero(named & (index < state[:, Field.MIN_TOKENS])[:, None])
    if len(banned[0]):
        ids = state[:, Field.STOP_IDS :][banned].astype(np.int64)
        rows.bias = Edits(banned[0], ids, np.full(len(ids), -np.inf, np.float32))
    return rows


def _route_inputs(
    state: Int32Array, tokens: npt.NDArray[np.int64], index: IntArray, alive: npt.NDArray[np.bool_]
) -> RouteInputs:
    leaves = alive & (state[:, Field.ROUTABLE] != 0)
    return RouteInputs(
        tokens=torch.from_numpy(tokens),
        index=torch.from_numpy(index),
        seed=torch.from_numpy(_seeds(state).view(np.int64)),
        choice=torch.from_numpy(state[:, Field.CHOICE].astype(np.int64)),
        params=torch.from_numpy(_floats(state, Field.PARAMS, MAX_PARAMS)),
        route=torch.from_numpy(np.where(leaves, state[:, Field.ROUTE], NO_ROUTE).astype(np.int32)),
    )
