"""How every benchmark's command line begins and ends."""

from __future__ import annotations

import argparse
import math
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from bench import end_at_once
from bench.endpoint import EndpointError
from trouterd.daemon import DaemonError
from trouterd.termination import Terminated, terminable

USAGE = 2
"""Exit code of a command that asks for something that cannot be, as argparse has it."""
_BY_SIGNAL = 128
"""What a shell adds to a signal's number."""


def run_command(name: str, main: Callable[[], int | None]) -> NoReturn:
    """Run a command and exit with its code; SIGTERM and Ctrl-C stop what it has started.

    Args:
        name: in messages, `bench.throughput`.
        main: returns the exit code; None is 0.
    """
    try:
        if signal.getsignal(signal.SIGINT) is end_at_once:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        with terminable():
            code = main()
    except (DaemonError, EndpointError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        code = 1
    except KeyboardInterrupt as error:
        number = signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT
        print(f"{name}: ended by {number.name}", file=sys.stderr)
        code = _BY_SIGNAL + number
    sys.exit(code)


def above_zero(text: str) -> float:
    """An option that is a finite number above 0."""
    return _finite(text, lambda value: value > 0, "a number above 0")


def not_negative(text: str) -> float:
    """An option that is a finite number of 0 or more."""
    return _finite(text, lambda value: value >= 0, "a number of 0 or more")


def _finite(text: str, fits: Callable[[float], bool], expected: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and fits(value)):
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
    return value


def whole_number(text: str) -> int:
    """An option that is a whole number from 1 on."""
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 on, got {text!r}")
    return int(text)


def whole_numbers(text: str) -> tuple[int, ...]:
    """An option that is several of them, with commas between."""
    return tuple(whole_number(part.strip()) for part in text.split(","))


def usage_fault(name: str, problem: object) -> int:
    """Say what is wrong with the command line, as argparse does; returns the exit code."""
    print(f"{name}: error: {problem}", file=sys.stderr)
    return USAGE
