"""Measurements, each of them `python -m bench.NAME`."""

import os
import signal
import sys
from types import FrameType


def end_at_once(number: int, frame: FrameType | None) -> None:
    """End by a signal while nothing has been started yet, as `run_command` ends by it later."""
    del frame
    os.write(sys.stderr.fileno(), f"bench: ended by {signal.Signals(number).name}\n".encode())
    os._exit(128 + number)


# What this interpreter was started for, which goes on importing for seconds; others who import the package keep their Ctrl-C.
if sys.argv[:1] == ["-m"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, end_at_once)
