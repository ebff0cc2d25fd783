"""How many active requests have a worker in their route: n of B[n], of which delayed batching makes its thresholds."""

from __future__ import annotations

from ipc.messages import Active
from trouterd.worker.outbound import Outbound
from trouterd.worker.request import Request

_UNKNOWN = -1


class ActiveCounts:
    """Counts of this worker's own entries, told to the peers, and those that other entries have told."""

    def __init__(self, index: int, outbound: Outbound) -> None:
        self._index = index
        self._outbound = outbound
        self._here: dict[int, int] = {}
        """Per worker: active requests of this entry whose route includes it."""
        self._told: dict[int, int] = {}
        self._elsewhere: dict[int, int] = {}
        """Per entry worker: its active requests that have this worker in their route."""
        self.untold = False
        """A peer has not taken its latest count yet."""

    @property
    def total(self) -> int:
        """Active requests of all entries whose route includes this worker."""
        return self._here.get(self._index, 0) + sum(self._elsewhere.values())

    def add(self, request: Request, change: int) -> None:
        """A request of this entry has begun (+1) or ended (-1)."""
        for worker in request.route.workers:
            self._here[worker] = self._here.get(worker, 0) + change

    def hear(self, message: Active) -> None:
        """Another entry's count. A dead entry's last word is not believed: its successor starts from zero."""
        if not self._outbound.is_down(message.source):
            self._elsewhere[message.source] = message.count

    def forget(self, worker: int) -> None:
        """A worker has died, and its counts with it. Its successor, which may have heard one already, is told anew."""
        self._elsewhere.pop(worker, None)
        self._told[worker] = _UNKNOWN

    def tell(self) -> None:
        """Send the peers the counts that have changed."""
        self.untold = False
        for worker, count in self._here.items():
            if worker == self._index or self._told.get(worker, 0) == count:
                continue
            if self._outbound.offer(worker, Active(self._index, count)):
                self._told[worker] = count
            elif self._outbound.available(worker):
                self.untold = True
