"""The rule of delayed batching: when a model launches what is ready, and which thresholds can never deadlock."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum


class Reason(Enum):
    """Why a batch is launched."""

    THRESHOLD = "threshold"
    LINGER = "linger"
    GUARD = "guard"
    PREFILL = "prefill"
    """Workers only: a prompt has to be fed, and what is ready goes along."""
    RELAX = "relax"
    """Workers only, by configuration: a member of the last batch is ready again."""


def feasible(thresholds: Sequence[int], active: int) -> bool:
    """Whether `active` requests can never all wait: sum(B_i - 1) < active. Fewer ones than models with B > 1 included."""
    return all(threshold >= 1 for threshold in thresholds) and sum(thresholds) - len(thresholds) < max(active, 1)


def clamp(thresholds: Sequence[int], active: int, max_batch: int | None = None) -> tuple[int, ...]:
    """The nearest thresholds that `active` requests can always reach.

    Each comes within 1..min(active, max_batch); then the largest ones are lowered, in turn, until they are feasible. Thresholds
    that are feasible already stay as they are.

    Args:
        thresholds: one per model.
        active: requests that can still become ready at one of these models: neither finished nor cancelled.
        max_batch: most requests of a batch.
    """
    most = max(1, active if max_batch is None else min(active, max_batch))
    clamped = [min(max(threshold, 1), most) for threshold in thresholds]
    excess = sum(clamped) - len(clamped) - max(active - 1, 0)
    for _ in range(excess):
        clamped[clamped.index(max(clamped))] -= 1
    return tuple(clamped)


def reason(ready: int, threshold: int, oldest_wait: float, linger: float | None) -> Reason | None:
    """Whether an idle model should launch all its ready requests now; None: it should wait.

    To be asked when a request becomes ready, when the number of active requests changes (a finish lowers thresholds), and
    when the oldest ready request has waited `linger`.

    Args:
        ready: requests that wait for a step here, stayers included.
        threshold: B[n] of this model for the present number of active requests.
        oldest_wait: seconds that the first of them has waited.
        linger: most seconds that it may wait; None: for ever.
    """
    if ready == 0:
        return None
    if ready >= threshold:
        return Reason.THRESHOLD
    if linger is not None and oldest_wait >= linger:
        return Reason.LINGER
    return None


def stranded(ready: Sequence[int]) -> int | None:
    """The model that must launch although none has reached its threshold: the one with most ready requests; None: nothing is ready.

    Only for a moment at which no model runs and no request is on its way. Feasible thresholds never get there; lists that are
    changed while requests move can.
    """
    return None if not any(ready) else max(range(len(ready)), key=lambda index: ready[index])
