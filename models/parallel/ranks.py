"""The other ranks as the first one sees them: orders go out, answers come in, and who is lost is known at once."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

from models.config import ModelError
from models.parallel.link import Answer, Failed, Link, LinkError, Order, Refused

Lost = Callable[[int, str], None]
"""(rank, what it said last or ''): that rank is gone, or out of step with this one. Called once, from any thread."""


OTHERS_FIRST = 0.2
"""Seconds in which the end of another rank is noticed."""
_FAREWELL = 1.0
"""Seconds that `close` waits for a thread that reads what a rank says, where somebody is lost."""


class RankLostError(RuntimeError):
    """Another rank is gone, and with it a part of the model: only a new process can serve it."""


class Ranks:
    """Links to the ranks 1, 2, ...; orders reach all of them in the same order.

    Args:
        links: to rank 1, 2, ...
        store_fd: an empty file that every rank's process has open under this number, for their meeting.
        on_loss: told of the first rank that is lost.
    """

    def __init__(self, links: Sequence[Link], store_fd: int, on_loss: Lost) -> None:
        self.world = len(links) + 1
        self.store_fd = store_fd
        self._links = links
        self._on_loss = on_loss
        self._answers: list[queue.SimpleQueue[Answer | None]] = [queue.SimpleQueue() for _ in links]
        self._lock = threading.Lock()
        self._lost = ""
        self._noticed = threading.Event()
        """Somebody is lost."""
        self._readers = [
            threading.Thread(target=self._read, args=(rank, link), name=f"rank-{rank}", daemon=True)
            for rank, link in enumerate(links, 1)
        ]
        for reader in self._readers:
            reader.start()

    @property
    def lost(self) -> bool:
        """Whether somebody is, of which `on_loss` is told."""
        return self._noticed.is_set()

    def tell(self, order: Order) -> None:
        """Give everybody the same order. Raises RankLostError."""
        self.tell_each(lambda _: order)

    def tell_each(self, orders: Callable[[int], Order]) -> None:
        """Give each rank an order of its own. Raises RankLostError."""
        for rank in range(1, self.world):
            self._send(rank, orders(rank))

    def answers(self) -> list[Answer]:
        """Wait for everybody's answer to the last order, by rank.

        Raises:
            ModelError: what one of them refused, in one line; all of them have answered.
            RankLostError: one of them is gone.
        """
        found = [answers.get() for answers in self._answers]
        given = [answer for answer in found if answer is not None]
        if len(given) < len(found):
            raise RankLostError(self._lost)
        for rank, answer in enumerate(given, 1):
            if isinstance(answer, Refused):
                raise ModelError(f"rank {rank} of {self.world}: {answer.message}")
        return given

    def lose(self, rank: int, words: str) -> None:
        """Say that a rank is gone, or that this one, 0, is out of step with the others."""
        if not rank:
            # A step breaks off most of all because somebody is gone, which is the better thing to say.
            self._noticed.wait(OTHERS_FIRST)
        with self._lock:
            first, self._lost = not self._lost, self._lost or f"rank {rank} of {self.world}: {words or 'gone'}"
            if first:
                self._noticed.set()
        if first:
            self._on_loss(rank, words)

    def close(self) -> None:
        """Let the others end; from now on nobody is lost who was not before."""
        with self._lock:
            self._lost = self._lost or "the links are closed"
        for link in self._links:
            link.hang_up()
        # Whom a reader tells of a loss may end this process instead of returning.
        patience = _FAREWELL if self.lost else None
        for reader, link in zip(self._readers, self._links, strict=True):
            reader.join(patience)
            if not reader.is_alive():
                link.close()

    def _send(self, rank: int, order: Order) -> None:
        if self._lost:
            raise RankLostError(self._lost)
        try:
            self._links[rank - 1].send(order)
        except OSError as error:
            self.lose(rank, "")
            raise RankLostError(self._lost) from error

    def _read(self, rank: int, link: Link) -> None:
        words = ""
        try:
            while (answer := link.answer()) is not None:
                if isinstance(answer, Failed):
                    words = answer.message
                    break
                self._answers[rank - 1].put(answer)
        except LinkError as error:
            words = str(error)
        self.lose(rank, words)
        for answers in self._answers:
            answers.put(None)
