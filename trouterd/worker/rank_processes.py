"""Processes of a split model's other ranks: a worker starts them, and ends as soon as one of them has ended."""

from __future__ import annotations

import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable, Sequence

from models.parallel.link import Link
from models.parallel.ranks import Ranks
from trouterd.interpreter import environment, module_command
from trouterd.logs import LogFormat
from trouterd.supervisor.process import exit_words

GRACE = 0.5
"""Seconds from the loss of a rank to the end of this process, whatever it is doing: a collective would wait for ever."""
BURIAL = 1.0
"""Seconds that a process may take to end after its link has ended."""
log = logging.getLogger(__name__)


class RankProcesses:
    """Started from a process's main thread: the kernel ends them with the thread that has started them.

    Args:
        name: the model's.
        world: ranks, this process's 0 included.
        log_level: of all of them.
        log_format: likewise.
        on_loss: told in one line that a rank is gone, from another thread; this process ends `GRACE` seconds later.
        module: what each of them runs.
    """

    def __init__(
        self,
        name: str,
        world: int,
        *,
        log_level: str,
        log_format: LogFormat,
        on_loss: Callable[[str], object],
        module: str = "trouterd.worker.rank",
    ) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("ranks are started by the main thread: they end with the thread that has started them")
        self._name = name
        self._on_loss = on_loss
        self._store = os.memfd_create(f"ranks of {name}")
        self._processes: list[subprocess.Popen[bytes]] = []
        options = ("--log-level", log_level, "--log-format", log_format)
        links = [self._start(module, f"{name}/{rank}", options) for rank in range(1, world)]
        self.ranks = Ranks(links, self._store, self._lost)

    @property
    def pids(self) -> list[int]:
        """Of rank 1, 2, ..."""
        return [process.pid for process in self._processes]

    def close(self) -> None:
        """Let them end, and wait for it."""
        self.ranks.close()
        for process in self._processes:
            process.wait()
        os.close(self._store)

    def _start(self, module: str, name: str, options: Sequence[str]) -> Link:
        ours, theirs = Link.pair()
        with theirs:
            command = module_command(module, "--name", name, "--link-fd", str(theirs.fileno()), *options)
            process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                [*command, "--parent", str(os.getpid())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno(), self._store],
                env=environment(),
            )
        self._processes.append(process)
        return Link(ours)

    def _lost(self, rank: int, words: str) -> None:
        line = f"{self._name}: {self._describe(rank)}{': ' if words else ''}{words}"
        log.critical("%s; ending with it, since the model is in pieces", line)
        self._on_loss(line)
        time.sleep(GRACE)
        # Not a normal exit: that one would wait for threads that sit in a collective.
        logging.shutdown()
        os._exit(1)

    def _describe(self, rank: int) -> str:
        """Who is lost, and how it ended."""
        if not rank:
            return "this process is out of step with its other ranks"
        process = self._processes[rank - 1]
        try:
            end = exit_words(process.wait(BURIAL))
        except subprocess.TimeoutExpired:
            end = "has failed"
        return f"rank {rank} (pid {process.pid}) {end}"
