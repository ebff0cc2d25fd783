"""A process beside a benchmark that listens on its standard input, and ends with it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from trouterd.interpreter import environment, module_command

_END = 10.0
"""Seconds that it gets to end."""


@contextmanager
def child(module: str, *arguments: str, variables: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """A module of ours in another process, with pipes for its input and output; ended with the block.

    Args:
        module: to run.
        arguments: of its command line.
        variables: further ones of its environment.
    """
    command, pipe = module_command(module, *arguments), subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment(**variables or {})) as process:
        try:
            yield process
        finally:
            if process.stdin is not None:
                with suppress(BrokenPipeError):  # it has ended before what was written last
                    process.stdin.close()
            try:
                process.wait(_END)
            except subprocess.TimeoutExpired:
                process.kill()
