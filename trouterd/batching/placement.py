"""Where the models of a plan run: together on the same GPUs, or each on its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from trouterd.batching.network import Network, NetworkError

SHARED, SEPARATE = PLACEMENTS = ("shared", "separate")
FASTER, SLOWER = 1.5, 0.35
"""Contention of two models on one GPU under MPS, of which the faster one has the persistent kernel on 40 % of the multiprocessors.

On one H200 it goes by the batch: for Qwen3-0.6B and 32B 0.7 to 1.0 and 0.3 to 0.45 where that kernel takes the small steps, of 4 to
16 rows; 1.5 to 2.2 and 0.2 to 0.35 where cuBLAS and Triton take them, of 48. Thresholds by this one pair for all of them lose 2 %
at most, as simulated. Lower ones lose more, higher ones make eager launches look worse (docs/batching.md, Contention)."""


@dataclass(frozen=True)
class Placement:
    """One of them, and what it costs."""

    name: str
    """"" where the options say nothing of it."""
    network: Network
    """With its contention."""
    gpus: int
    """That are paid for."""
    alone: int
    """That the slowest model would need without the others."""


def beside_each_other(count: int, slowest: int) -> tuple[float, ...]:
    """Contention of a pair on one GPU."""
    return tuple(SLOWER if model == slowest else FASTER for model in range(count))


def placed(network: Network, name: str, contention: Sequence[float], gpus: Sequence[int], slowest: int) -> Placement:
    """A network where `name` says.

    Args:
        network: without contention; models take turns where they are together, if it says so.
        name: one of PLACEMENTS, or "": shared if there is contention.
        contention: one factor per model, of models that share GPUs; empty: FASTER and SLOWER where a placement is named, else none.
        gpus: of each model, or one number for the whole deployment; empty: one per model.
        slowest: the model that takes longest for a step.

    Raises:
        NetworkError: numbers that fit neither the models nor the placement.
    """
    count = network.size
    if len(gpus) == 1 and name:
        raise NetworkError("--gpus: with --placement it takes one number per model, whose sum or largest is paid for")
    if len(gpus) not in (0, 1, count):
        raise NetworkError(f"--gpus: {len(gpus)} numbers for {count} models")
    if name == SHARED and not contention:
        if count > 2:
            raise NetworkError("--placement shared: for three or more models no factors are known; set --contention")
        contention = beside_each_other(count, slowest)
    together = name == SHARED or (not name and (network.turns or any(contention)))
    if len(gpus) == 1:
        paid = alone = gpus[0]
    else:
        each = tuple(gpus) or (1,) * count
        paid, alone = (max(each) if together else sum(each)), each[slowest]
    turns = network.turns and together
    own = tuple(contention) if together and not turns else ()
    return Placement(name, replace(network, contention=own, turns=turns), paid, alone)
