"""How many KV pages fit into a device's memory: arithmetic on measured sizes, in any one unit (bytes)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class MemoryBudgetError(ValueError):
    """The models do not fit; the message says which memory fraction would."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """What one model takes on a device, measured."""

    weights: int
    graphs: int
    workspace: int
    page: int
    """One KV page in all layers."""

    @property
    def fixed(self) -> int:
        """What is taken before the first page."""
        return self.weights + self.graphs + self.workspace


def kv_budget(total: int, fraction: float, models: Sequence[Footprint], *, available: int | None = None) -> int:
    """What is left for KV of all models on one device.

    Args:
        total: the device's memory.
        fraction: share of it that all models together may take.
        models: what each takes.
        available: what can be had at all, when others use the device too; None = all of it.

    Raises:
        MemoryBudgetError: if the share cannot be had, or leaves room for no page.
    """
    share = round(total * fraction)
    if available is not None and share > available:
        raise MemoryBudgetError(
            f"memory fraction {fraction:g} of {total} is not free: others leave {available}; "
            f"the largest fraction that fits is {_cut(available / total)}"
        )
    fixed = sum(model.fixed for model in models)
    least = fixed + sum(model.page for model in models)
    if share < least:
        need = f"weights, graphs and workspace take {fixed}, memory fraction {fraction:g} of {total} allows {share}"
        if least > total:
            raise MemoryBudgetError(f"{need}; the device is too small")
        raise MemoryBudgetError(f"{need}; the smallest fraction that leaves room for KV is {_raised(least / total)}")
    return share - fixed


def common_pages(total: int, fraction: float, models: Sequence[Footprint], *, available: int | None = None) -> int:
    """The largest number of pages that every model on the device can have; arguments and errors as `kv_budget`."""
    return kv_budget(total, fraction, models, available=available) // sum(model.page for model in models)


def _cut(fraction: float) -> float:
    return int(fraction * 1000) / 1000


def _raised(fraction: float) -> float:
    return min(1.0, -int(-fraction * 1000 // 1) / 1000)
