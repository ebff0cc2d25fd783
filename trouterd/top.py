"""`trouterctl top`: batch sizes, queues and rates of every model, from two looks at the daemon at a time."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from trouterd.table import table

INTERVAL = 1.0
"""Seconds between two looks."""
_HEAD = ("MODEL", "BATCH", "B", "ACTIVE", "QUEUE", "PENDING", "HELD", "TOKEN/S", "HAND-OFFS/S", "STEPS/S")
_CANNOT_REDRAW = ("", "dumb", "unknown")
"""Values of $TERM."""

Look = Callable[[], dict[str, Any]]


def add_top(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument("--once", action="store_true", help="print one view and end")
    parser.add_argument(
        "--interval", type=_seconds, default=INTERVAL, metavar="S", help="seconds between two looks (1)"
    )
    parser.set_defaults(converse=lambda options, ask: watch(options, lambda: ask("batching")))


def watch(options: argparse.Namespace, look: Look) -> int:
    """Show what changes until interrupted, or once; plain text where there is no terminal."""
    before = look()
    if options.once or options.json or not _can_redraw():
        while True:
            time.sleep(options.interval)
            now = look()
            view = rates(before, now)
            text = json.dumps(view) if options.json else "\n".join(lines(view))
            sys.stdout.write(f"{text}\n")
            sys.stdout.flush()
            if options.once:
                return 0
            before = now
    return _live(options.interval, look, before)


def _can_redraw() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM", "") not in _CANNOT_REDRAW


def rates(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """What happened between two looks: per model, and per group of models that hand requests to each other."""
    models = {}
    for name, new in now["models"].items():
        old = before["models"].get(name, {})
        if "error" in new or "error" in old or not old or new["since"] != old["since"]:
            models[name] = {"error": new.get("error", "it has just been started")}
            continue
        seconds = new["now"] - old["now"]
        steps = new["steps"] - old["steps"]
        models[name] = {
            "batch": (new["step_requests"] - old["step_requests"]) / steps if steps else 0.0,
            "threshold": new["threshold"],
            "active": new["active"],
            "queue": new["queue"],
            "pending": new["pending"],
            "held": (new["held_seconds"] - old["held_seconds"]) / seconds,
            "tokens_per_second": (new["tokens"] - old["tokens"]) / seconds,
            "handoffs_per_second": (new["handoffs"] - old["handoffs"]) / seconds,
            "steps_per_second": steps / seconds,
        }
    groups = [
        {key: group[key] for key in ("models", "state", "measured", "predicted", "ideal")}
        | {"of_ideal": group["measured"] / group["ideal"] if group["ideal"] else 0.0}
        for group in now["controller"].get("groups", ())
    ]
    return {"models": models, "groups": groups}


def lines(view: Mapping[str, Any]) -> Iterable[str]:
    """A view as text."""
    yield from table(_HEAD, [_cells(name, model) for name, model in view["models"].items()])
    for group in view["groups"]:
        predicted = f"{group['predicted']:.1f}" if group["predicted"] else "-"
        of_ideal = f"{group['of_ideal']:.0%}" if group["ideal"] else "-"
        yield (
            f"{' > '.join(group['models'])}: {group['measured']:.1f} token/s, predicted {predicted},"
            f" {of_ideal} of ideal; {group['state']}"
        )


def _cells(name: str, model: Mapping[str, Any]) -> tuple[str, ...]:
    if "error" in model:
        return (name, model["error"], *[""] * (len(_HEAD) - 2))
    return (
        name,
        f"{model['batch']:.1f}",
        *(str(model[key]) for key in ("threshold", "active", "queue", "pending")),
        f"{model['held']:.0%}",
        *(f"{model[key]:.1f}" for key in ("tokens_per_second", "handoffs_per_second", "steps_per_second")),
    )


def _live(interval: float, look: Look, before: Mapping[str, Any]) -> int:
    # Only here: it takes longer to import than everything else that trouterctl does.
    from rich.live import Live
    from rich.text import Text

    with Live(Text("..."), screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            now = look()
            live.update(Text("\n".join(lines(rates(before, now))), no_wrap=True, overflow="crop"), refresh=True)
            before = now


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.05 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"expected seconds from 0.05 to 3600, got {text!r}")
    return seconds
