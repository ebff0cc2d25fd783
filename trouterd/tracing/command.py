"""`trouterctl trace`: has the daemon record, writes the timeline, prints where the time went. Imports nothing heavy."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from trouterd.tracing.chrome import Json, chrome
from trouterd.tracing.events import EVENTS, LEAST_SECONDS, MOST_SECONDS, Event, Summary
from trouterd.tracing.report import lines, report

SECONDS = 5.0
LOOK = 1.0
"""Seconds after which the daemon hears that somebody still waits for the trace."""

LATE = 0.1
"""Seconds by which a model's part may begin after the first one's, unmentioned."""

Ask = Callable[..., Any]
"""`ask(verb, **args)`: what the daemon answers."""

_TEXT = """\
Records what every model's decode loop does for a while, prints where the time went, and writes it as a timeline
(Chrome trace events: open the file with ui.perfetto.dev or chrome://tracing). Ctrl-C ends the recording early.

BUSY to NOTHING READY are shares of the time and add up to 100 %:
  BUSY           the device computes
  OVERHEAD       a step is being launched, or its end has not been noticed yet
  LOOP           requests are ready, and the decode loop has not launched them yet
  HELD           requests are ready, and delayed batching waits for more, or it is another model's turn (batching.overlap)
  NO ROOM        requests are here, and the KV pool has no room for them
  NOTHING READY  no request is here
BATCH is requests with a token per step, PREFILL the share of BUSY that fed prompts; P50 and P99 are of the time from
sending a hand-off to the launch of its step here."""


def add_trace(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.description, parser.formatter_class = _TEXT, argparse.RawDescriptionHelpFormatter
    parser.add_argument("--seconds", type=_seconds, default=SECONDS, metavar="S", help="how long to record (5)")
    parser.add_argument(
        "--model", action="append", default=[], metavar="NAME", help="record this model; may be repeated (all)"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("trace.json"), metavar="FILE", help="the timeline (trace.json)"
    )
    parser.add_argument("--summary", action="store_true", help="write no timeline")
    parser.set_defaults(converse=run)


def run(options: argparse.Namespace, ask: Ask) -> int:
    """Record, write and print; returns the exit code."""
    begun = ask("trace", seconds=options.seconds, models=options.model)
    try:
        reports = _record(options, ask, begun)
    except _FileError as error:
        sys.stderr.write(f"trouterctl: {error}\n")
        return 1
    finally:
        ask("trace-end", trace=begun["trace"])
    _print(options, reports)
    return int(all("error" in model for model in reports.values()))


class _FileError(Exception):
    """The timeline cannot be written."""


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _FileError(f"{path}: {error.strerror or error}") from error


def _record(options: argparse.Namespace, ask: Ask, begun: Mapping[str, Any]) -> dict[str, Any]:
    """Where each model's time went, or why that is not known; the timeline is in its file then."""
    number = begun["trace"]
    if not options.summary:
        # Before the wait: one that cannot be written is not worth it.
        with _writing(options.output):
            options.output.open("w").close()
    _wait(ask, number)
    answers: dict[str, Any] = ask("trace-stop", trace=number)
    known = {name: msgspec.convert(answer, Summary) for name, answer in answers.items() if "error" not in answer}
    start = min((summary.begin for summary in known.values()), default=0.0)
    reports = answers | {name: report(summary, start) for name, summary in known.items()}
    if options.summary:
        return reports
    events: dict[str, list[Event]] = {name: [] for name in known}
    for name, recorded in events.items():
        reports[name]["unread"] = _read(ask, number, name, recorded)
    with _writing(options.output), options.output.open("w") as file:
        for part in _document(chrome(events, begun["workers"], start), reports):
            file.write(part)
    return reports


def _wait(ask: Ask, number: int) -> None:
    try:
        while (left := ask("trace-left", trace=number)) > 0:
            time.sleep(min(left, LOOK))
    except KeyboardInterrupt:
        sys.stderr.write("trouterctl: the trace ends early\n")


def _read(ask: Ask, number: int, model: str, events: list[Event]) -> str:
    """Add a model's events; why some are missing, '' if none are."""
    while True:
        part = ask("trace-read", trace=number, model=model)
        if "error" in part:
            return str(part["error"])
        events += EVENTS.decode(part["events"])
        if not part["left"]:
            return ""


def _document(rows: Iterable[Json], reports: Mapping[str, Any]) -> Iterable[str]:
    """JSON, an event a line."""
    yield '{"displayTimeUnit": "ms", "traceEvents": [\n'
    before = ""
    for row in rows:
        yield before + json.dumps(row)
        before = ",\n"
    yield f'\n], "otherData": {json.dumps({"models": reports})}}}\n'


def _print(options: argparse.Namespace, reports: Mapping[str, Any]) -> None:
    if options.json:
        sys.stdout.write(f"{json.dumps(reports)}\n")
        return
    notes = [note for name, model in reports.items() for note in _notes(name, model, timeline=not options.summary)]
    end = [] if options.summary else [f"timeline: {options.output}"]
    sys.stdout.write("".join(f"{line}\n" for line in (*lines(reports), *notes, *end)))


def _notes(name: str, model: Mapping[str, Any], *, timeline: bool) -> Iterator[str]:
    """What is missing of a model's part."""
    if "error" in model:
        return
    if model["late_seconds"] > LATE:
        yield f"{name}: its part begins {model['late_seconds']:.2f} s late"
    if timeline and model["dropped_events"]:
        yield f"{name}: the timeline lacks the first {model['dropped_events']} events"
    if timeline and model["unread"]:
        yield f"{name}: the timeline lacks what had not been read: {model['unread']}"


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not LEAST_SECONDS <= seconds <= MOST_SECONDS:
        raise argparse.ArgumentTypeError(f"expected seconds from {LEAST_SECONDS:g} to {MOST_SECONDS:g}, got {text!r}")
    return seconds
