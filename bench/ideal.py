"""The most tokens per second that any launching of batches could have reached in a window, by its own step times and routing."""

from __future__ import annotations

from collections.abc import Mapping

from bench.counters import Scrape
from bench.target import ModelCounters
from trouterd.batching.bound import ideal as bound
from trouterd.batching.network import Network, StepTime, keep_commit


def ideal(spent: Mapping[str, ModelCounters], streams: int, page: Scrape | None) -> float | None:
    """Tokens/s; prefill, hand-offs and HTTP cost nothing in it.

    Step times by batch, and what models that share a GPU do to each other, are as the daemon's controller has learned them, in
    the main from the window itself. Where it knows too little, a model's mean step time of the window stands for all batches.

    Args:
        spent: what each model has done in the window.
        streams: requests under way.
        page: metrics after the window.

    Returns:
        None where no model has done anything.
    """
    used = {name: own for name, own in spent.items() if own.step_requests and own.busy_seconds > 0}
    decisions = sum(own.step_requests for own in used.values())
    tokens = sum(own.tokens for own in used.values())
    if not tokens:
        return None
    means = {name: StepTime.affine(own.busy_seconds / own.steps) for name, own in used.items()}
    if len(used) == 1:
        (mean,) = means.values()
        return streams / mean.of(streams) * tokens / decisions
    learned = _learned(page) if page else {}
    known = learned.keys() >= used.keys()
    shares = tuple(own.step_requests / decisions for own in used.values())
    network = Network(
        step_times=tuple(learned[name] if known else mean for name, mean in means.items()),
        # The bound asks for shares of steps alone; any moves that lead to these will do.
        routing=(shares,) * len(used),
        commit=keep_commit(len(used)),
        contention=_contention(page, tuple(used)) if page and known else (),
    )
    return bound(network, streams, shares) * tokens / decisions


def _learned(page: Scrape) -> dict[str, StepTime]:
    points: dict[str, list[tuple[float, float]]] = {}
    for (name, labels), seconds in page.samples.items():
        if name == "batching_step_seconds":
            own = dict(labels)
            points.setdefault(own["model"], []).append((float(own["batch"]), seconds))
    return {model: StepTime(tuple(sorted(found))) for model, found in points.items()}


def _contention(page: Scrape, models: tuple[str, ...]) -> tuple[float, ...]:
    factors = page.by("batching_contention", "model")
    return tuple(factors.get(model, 0.0) for model in models)
