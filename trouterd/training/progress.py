"""Progress bars on standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class Bars:
    """The bars of one run, one per stage."""

    def __init__(self) -> None:
        self.console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self.console,
        )

    @contextmanager
    def shown(self) -> Iterator[None]:
        """While a run lasts."""
        with self._progress:
            yield

    def stage(self, name: str, total: int) -> Callable[[int], None]:
        """A bar of `total` items; what is returned counts items that are done."""
        task = self._progress.add_task(name, total=total)
        return lambda count: self._progress.advance(task, count)

    def epochs(self, name: str) -> Callable[[int, float], None]:
        """A bar of epochs, which also shows the validation loss; nobody knows how many there will be."""
        task = self._progress.add_task(name, total=None)

        def done(epoch: int, loss: float) -> None:
            self._progress.update(task, completed=epoch, description=f"{name}, validation loss {loss:.4f}")

        return done

    @contextmanager
    def working(self, name: str) -> Iterator[None]:
        """A stage of unknown length."""
        task = self._progress.add_task(name, total=None)
        yield
        self._progress.update(task, total=1, completed=1)
