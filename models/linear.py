"""Matrix products whose rows do not depend on each other, bit for bit.

BLAS picks kernels by the number of rows, so a row's last bits change with its batch mates. Here products only ever run
with row counts from a small list; at start-up every count on it is compared on this machine's own kernels, and counts
that would change a row's bits are dropped. What remains is the `RowPlan`: rows are padded up to the next count on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  (its usual name)

_COUNTS = (4, 8, 12, 16, 24, 32, 48, 64, 80, 96, 128, 160, 192, 224, 256)
_COUNTS_LARGE = _COUNTS[:6]
_LARGE = 1 << 24
"""Elements of a weight from which on the start-up check would take seconds with the longer list."""
_TILES = (32, 16, 1)

Product = Callable[[torch.Tensor], torch.Tensor]
"""A row-wise product: [M, K] -> [M, N]."""


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Row counts with which products may run, rising; the last one is the tile that larger batches are cut into."""

    counts: tuple[int, ...]

    def padded(self, rows: int) -> int:
        """The smallest allowed number of rows, at least `rows`."""
        whole, rest = divmod(rows, self.counts[-1])
        if rest or not whole:
            return whole * self.counts[-1] + next(count for count in self.counts if count >= rest)
        return rows

    def pieces(self, rows: int) -> Iterator[tuple[int, int]]:
        """Start and end of the tiles of a padded number of rows."""
        step = self.counts[-1]
        for start in range(0, rows, step):
            yield start, min(start + step, rows)

    def agree(self, other: RowPlan) -> RowPlan:
        """The counts that both plans allow, cut to the smaller tile."""
        common = tuple(count for count in self.counts if count in other.counts)
        return RowPlan(common or (1,))


def linear(x: torch.Tensor, weight: torch.Tensor, plan: RowPlan, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, K] times weight [N, K] transposed, plus bias [N]; T is a padded row count of `plan`."""
    if len(x) <= plan.counts[-1]:
        return F.linear(x, weight, bias)
    out = x.new_empty(len(x), len(weight))
    for start, end in plan.pieces(len(x)):
        out[start:end] = F.linear(x[start:end], weight, bias)
    return out


def plan_rows(weights: Iterable[torch.Tensor]) -> RowPlan:
    """The plan that holds for products with all of these [N, K] weights, on their device, with the threads set now."""
    plan = RowPlan(_COUNTS)
    seen = set()
    for weight in weights:
        kind = (weight.shape, weight.dtype, weight.device)
        if kind not in seen:
            seen.add(kind)
            plan = plan.agree(_plan_linear(weight))
    return plan


def plan_batched(keys: int, width: int, *, transposed: bool, device: torch.device) -> RowPlan:
    """The plan for float32 `torch.bmm` of [B, M, K] with [B, K, N], as attention uses it.

    `transposed`: K is `width` and N is `keys` (queries times keys); else the other way round (weights times values).
    """
    generator = torch.Generator().manual_seed(1)
    shape = (3, width, keys) if transposed else (3, keys, width)
    right = torch.randn((3, keys, width), generator=generator).to(device)
    right = right.transpose(1, 2) if transposed else right
    x = torch.randn((_COUNTS[-1], shape[1]), generator=generator).to(device)
    return _plan(lambda rows: torch.bmm(rows.expand(3, -1, -1), right).transpose(0, 1), x, _COUNTS)


def _plan_linear(weight: torch.Tensor) -> RowPlan:
    counts = _COUNTS if weight.numel() <= _LARGE else _COUNTS_LARGE
    x = torch.randn((counts[-1], weight.shape[1]), generator=torch.Generator().manual_seed(0)).to(weight)
    return _plan(lambda rows: F.linear(rows, weight), x, counts)


def _plan(product: Product, x: torch.Tensor, counts: tuple[int, ...]) -> RowPlan:
    """All counts from the smallest one on that agrees with every larger one; one fixed tile when there are too few."""
    reference = product(x)
    size = len(x)
    first = size
    for count in reversed(counts):
        # Head and tail of x: the same rows at other places, among other neighbours.
        head, tail = product(x[:count]), product(x[size - count :].clone())
        if not torch.equal(head, reference[:count]) or not torch.equal(tail, reference[size - count :]):
            break
        first = count
    if first <= _TILES[0]:
        return RowPlan(tuple(count for count in counts if count >= first))
    return RowPlan((next(tile for tile in _TILES if _steady(product, x[:tile])),))


def _steady(product: Product, x: torch.Tensor) -> bool:
    """Whether rows keep their bits at every place of a tile of this size, whatever the other rows hold."""
    reference = product(x)
    return all(torch.equal(product(x.roll(step, dims=0)), reference.roll(step, dims=0)) for step in range(1, len(x)))
