"""Main function of a rank other than the first of a split model."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence

from models.parallel.follower import Follower
from models.parallel.link import Failed, Link
from models.parallel.part import Loader, load_part
from trouterd import logs
from trouterd.child import die_with_parent

log = logging.getLogger("trouterd.rank")


def main(argv: Sequence[str] | None = None, load: Loader = load_part) -> None:
    """Does not return. Arguments are the worker's business: see `RankProcesses`."""
    parser = argparse.ArgumentParser(prog="trouterd.worker.rank")
    parser.add_argument("--name", required=True)
    parser.add_argument("--link-fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--log-level", required=True)
    parser.add_argument("--log-format", required=True)
    options = parser.parse_args(argv)
    die_with_parent(options.parent)
    # The worker alone decides when this ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logs.setup(options.name, options.log_level, options.log_format)
    code = serve(Link(socket.socket(fileno=options.link_fd)), load)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not a normal interpreter exit: that one would wait for collectives that nobody joins any more.
    os._exit(code)


def serve(link: Link, load: Loader) -> int:
    """Do what the first rank says until it hangs up, or until something fails, which it is told; returns the exit code."""
    try:
        Follower(link, load).serve()
    except (BrokenPipeError, ConnectionResetError):
        log.debug("the first rank is gone")
    except Exception as error:  # the main boundary: whatever it was, say it and exit non-zero
        log.critical("failed", exc_info=error)
        with contextlib.suppress(OSError):
            link.send(Failed(message=f"{type(error).__name__}: {' '.join(str(error).split())}"[:2000]))
        return 1
    return 0


if __name__ == "__main__":
    main()
