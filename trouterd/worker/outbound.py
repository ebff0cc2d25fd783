"""What a worker sends: refusable messages at once or not at all, the others in order until they are through."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from ipc.messages import Message

API = -1
"""Destination number of the api process; workers have their index from 0."""

Send = Callable[[int, Message], bool]
"""Puts one message on the ring to a process; False when ring and spill are full."""
Together = Callable[[int], AbstractContextManager[None]]


class Outbound:
    """Sends messages, remembers those that may not be lost, and knows which processes can be sent to."""

    def __init__(self) -> None:
        self._send: Send = _unconnected
        self._unsent: dict[int, deque[Message]] = {}
        self._down: set[int] = set()
        self._stalled: set[int] = set()
        self.together: Together = _one_by_one
        """A block whose messages leave together, so many at a time or, with 0, all of them at its end: hand-offs of one step can
        then be one batch of their receiver."""

    def connect(self, send: Send, together: Together | None = None) -> None:
        """Messages leave through `send` from now on."""
        self._send = send
        self.together = together or _one_by_one

    def available(self, target: int) -> bool:
        """The process is up and answers: requests may be handed to it."""
        return target not in self._down and target not in self._stalled

    def is_down(self, target: int) -> bool:
        """The process is dead and has not been replaced yet."""
        return target in self._down

    def offer(self, target: int, message: Message) -> bool:
        """Send now, or False: the caller keeps what it wanted to give away."""
        return self.available(target) and not self._unsent.get(target) and self._send(target, message)

    def post(self, target: int, message: Message) -> None:
        """Send now or, in order, as soon as there is room; dropped only if the process dies, and its requests with it."""
        if target in self._down:
            return
        queue = self._unsent.get(target)
        if queue:
            queue.append(message)
        elif not self._send(target, message):
            self._unsent[target] = deque([message])

    def flush(self) -> None:
        """Try again what has not been sent yet."""
        for target, queue in self._unsent.items():
            while queue and self._send(target, queue[0]):
                queue.popleft()

    @property
    def unsent(self) -> int:
        """Messages that wait for room."""
        return sum(len(queue) for queue in self._unsent.values())

    def set_state(self, target: int, state: str) -> None:
        """Note a process as 'up', 'stalled' or 'down'."""
        self._down.discard(target)
        self._stalled.discard(target)
        if state == "down":
            self._down.add(target)
            self._unsent.pop(target, None)
        elif state == "stalled":
            self._stalled.add(target)


def _one_by_one(most: int) -> AbstractContextManager[None]:
    del most
    return nullcontext()


def _unconnected(target: int, message: Message) -> bool:
    del target, message
    return False
