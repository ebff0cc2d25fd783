"""The two ring cores behind one interface: C where it was built, pure Python on x86-64 otherwise."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence
from typing import Protocol, cast

Buffer = bytes | bytearray | memoryview
Handler = Callable[[int, memoryview], None]
"""Called with the kind and a view of one message; the view is valid only until the handler returns."""

TOO_LARGE, CLOSED, POISONED = -1, -2, -3
"""What a push gives instead of a PushResult."""

log = logging.getLogger(__name__)


class ProducerCore(Protocol):
    """The writing end: moves bytes and cursors, knows no locks, loops or errors."""

    def push(self, payload: Buffer, kind: int, /) -> int:
        """Writes and publishes one message: a PushResult or a negative code."""

    def push_many(self, payloads: Sequence[Buffer], kind: int, /) -> int:
        """Writes as many as fit and publishes them together: their number or a negative code."""

    def prepare_wait(self, length: int, /) -> bool:
        """Announces that this end waits for room for `length` bytes; False if there is room already."""

    def cancel_wait(self) -> None:
        """Takes the announcement back."""

    def close(self) -> None:
        """Lets go of the memory."""

    @property
    def free_bytes(self) -> int:
        """Free bytes, record headers included."""


class ConsumerCore(Protocol):
    """The reading end."""

    def poll(self, handler: Handler, max_records: int, max_bytes: int, /) -> int:
        """Hands over messages and releases them together: their number or a negative Fault."""

    def prepare_wait(self) -> bool:
        """Announces that this end sleeps; False if there is data already."""

    def cancel_wait(self) -> None:
        """Takes the announcement back."""

    def spin(self, microseconds: int, /) -> bool:
        """Looks for data for a while without announcing a sleep."""

    def close(self) -> None:
        """Lets go of the memory; BufferError while a view of a message lives."""

    @property
    def pending(self) -> int:
        """Bytes published and not yet released."""

    @property
    def position(self) -> int:
        """The consumer's cursor: bytes released since the ring was created."""


class ProducerFactory(Protocol):
    """Makes the writing end over a mapped segment; ValueError if its cursors are impossible."""

    def __call__(self, memory: memoryview, data_event: int) -> ProducerCore: ...


class ConsumerFactory(Protocol):
    """Makes the reading end over a mapped segment; ValueError if its cursors are impossible."""

    def __call__(self, memory: memoryview, space_event: int) -> ConsumerCore: ...


class Core(Protocol):
    """A module that has both ends."""

    FENCE: int
    """1 if the peer of such an end must fence for both with membarrier before it sleeps."""

    @property
    def Producer(self) -> ProducerFactory:  # noqa: N802 - a class of the module
        """The writing end."""

    @property
    def Consumer(self) -> ConsumerFactory:  # noqa: N802 - a class of the module
        """The reading end."""


def load_core(name: str | None = None) -> Core:
    """The core called "c" or "python"; by default the C core if it was built.

    Raises ImportError for "c" when it was not built, UnsupportedMachineError for "python" off x86-64.
    """
    if name != "python":
        try:
            return cast(Core, importlib.import_module("ipc._ring"))
        except ImportError:
            if name == "c":
                raise
            log.warning("the C ring core is not built; using the pure-Python ring, which is about eight times slower")
    return cast(Core, importlib.import_module("ipc.fallback"))
