"""The most tokens per second of a window's own steps: what its requests would write if they were in one at every moment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.target import ModelCounters


def ideal(spent: Mapping[str, ModelCounters], streams: int) -> float | None:
    """Tokens/s of requests that never wait: not for a launch, not for a hand-off, not for their client.

    Every step takes what that model's took in the window in the mean, whatever it holds, and requests take as many of each model
    for a token as they did there. So it is the same for every system that counts its steps, and nothing of other windows is in it;
    steps that are longer than they need be, for their rows or beside another model's, are no loss to it.

    Args:
        spent: what each model has done in the window.
        streams: requests under way.

    Returns:
        None where no model has done anything.
    """
    used = [own for own in spent.values() if own.step_requests and own.busy_seconds > 0]
    tokens = sum(own.tokens for own in used)
    if not tokens:
        return None
    # Seconds of all requests.
    in_steps = sum(own.step_requests * own.busy_seconds / own.steps for own in used)
    return streams * tokens / in_steps


def ideal_of(window: Mapping[str, Any]) -> float | None:
    """The same for a window as it is in a file, whatever it was told to be when that was written.

    Args:
        window: fields of `bench.window.Window`.
    """
    written, seconds = window.get("tokens_per_model") or {}, window.get("seconds") or 0.0
    spent = {}
    for name, batch in (window.get("batch") or {}).items():
        busy = float(window["busy"][name]) * seconds
        steps = 1e3 * busy / float(window["step_ms"][name])
        spent[name] = ModelCounters(
            round(float(written.get(name, 0.0)) * seconds), round(steps), round(batch * steps), busy, 0
        )
    return ideal(spent, int(window["streams"]))
