"""When the decode loop launches what is ready: delayed batching (arXiv 2610.12242) as one worker sees it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from trouterd.batching.launch import Reason, reason
from trouterd.metrics import Histogram
from trouterd.worker.active import ActiveCounts
from trouterd.worker.request import Request
from trouterd.worker.scheduler import Chunk, Scheduler
from trouterd.worker.stepper import NEVER

DEFAULT_LINGER = 0.1
"""Seconds, while nobody knows how long steps take."""
HOLDS = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0)
"""Upper bounds of the time that a launch was held back, seconds."""
_ROUNDING = 1e-9


class Launching:
    """The rule of one worker; asked before every launch, by the decode loop only.

    *Ready* is a request that can take a row now: it is here and runs, or has arrived. A step is launched when at least B[n] are
    ready, n being the active requests whose route includes this model; when the first of them has waited `linger`; or when a prompt
    has to be fed, which gains nothing from company and takes the others along. The linger time alone bounds every wait, whatever
    other workers do: a worker sees neither where the other requests are nor what is on its way.

    Behind a step in flight, a request whose next token that step gives counts as the share of its route's requests that stay.
    """

    def __init__(self, scheduler: Scheduler, active: ActiveCounts) -> None:
        self._scheduler = scheduler
        self._active = active
        self._list: tuple[int, ...] = ()
        """B[n] from n = 1 on; empty: always 1."""
        self._relax = False
        self.linger = DEFAULT_LINGER
        """Seconds."""
        self.reasons: Counter[Reason] = Counter()
        """Launches while B was above 1."""
        self.holds = Histogram(HOLDS)
        """Seconds for which those were held back."""
        self._since = 0.0
        """When the first ready request became ready; 0: unknown."""
        self._held = 0.0
        """When a launch was held back first; 0: it was not."""
        self._ready: Sequence[Request] = ()
        """As of the last `due`; a step in flight says what it leaves here."""
        self._reason: Reason | None = None
        self._last: frozenset[int] = frozenset()
        """Ids of the last launch's requests, as far as `relax` needs them."""

    @property
    def thresholds(self) -> tuple[int, ...]:
        """The list in force; empty where B is always 1."""
        return self._list

    @property
    def threshold(self) -> int:
        """B for the present number of active requests."""
        if not self._list:
            return 1
        active = max(self._active.total, 1)
        return min(self._list[min(active, len(self._list)) - 1], active)

    @property
    def reason(self) -> Reason | None:
        """What `due` allowed the latest launch for; None where nothing is waited for."""
        return self._reason

    @property
    def ready(self) -> int:
        """Requests that were ready then."""
        return len(self._ready)

    @property
    def holding(self) -> bool:
        """A launch is held back."""
        return self._held > 0

    def configure(self, thresholds: Sequence[int], linger: float, *, relax: bool) -> None:
        """Put a list into force; between two steps only.

        Args:
            thresholds: B[n] from n = 1 on; beyond the end the last one holds. Empty: 1.
            linger: seconds.
            relax: launch for any member of the last batch that is ready.
        """
        self._list = () if all(threshold == 1 for threshold in thresholds) else tuple(thresholds)
        self.linger = linger
        self._relax = relax
        if not self._list:
            self._since = self._held = 0.0
            self._ready, self._reason = (), None

    def due(self, now: float, *, in_flight: bool) -> float:
        """When to launch: 0 = now, otherwise not before this time.monotonic() unless something happens; NEVER: not before that.

        Args:
            now: time.monotonic().
            in_flight: the launch would be queued behind a step.
        """
        if not self._list:
            return 0.0
        threshold = self.threshold
        if threshold == 1:
            self._ready, self._reason = (), None
            self._since = self._held = 0.0
            return 0.0
        self._reason = self._why(threshold, now, in_flight)
        if not (self._ready or in_flight):
            # Who was held back is gone, and the next one is held back since it came.
            self._held = 0.0
            return 0.0
        if self._reason is not None:
            return 0.0
        self._held = self._held or now
        return self._since + self.linger if self._since else NEVER

    def launched(self, chunks: Sequence[Chunk], now: float) -> None:
        """What `due` allowed has been launched."""
        if not self._list:
            return
        if self._reason is not None:
            self.reasons[self._reason] += 1
            self.holds.observe(now - self._held if self._held else 0.0)
        launched = {chunk.request for chunk in chunks}
        if launched.issuperset(self._ready):
            # Those that found no room go on waiting since then.
            self._since = 0.0
        self._held = 0.0
        self._last = frozenset(request.rid for request in launched) if self._relax else frozenset()

    def _why(self, threshold: int, now: float, in_flight: bool) -> Reason | None:
        """The reason to launch, if there is one; notes how many are ready, and since when."""
        scheduler = self._scheduler
        waiting = () if scheduler.short_of_room else scheduler.waiting
        certain: list[Request] = []
        prefill, sent = scheduler.cold, 0
        for request in (*scheduler.running, *waiting):
            if (in_flight and request.uncertain) or not request.due:
                continue
            certain.append(request)
            prefill = prefill or request.fed < request.prompt_length - 1
            if request.handoff_sent_ns and (not sent or request.handoff_sent_ns < sent):
                sent = request.handoff_sent_ns
        self._ready = certain
        # A hand-off was ready when it was sent, although it may have been seen after a step only.
        self._since = min(self._since or now, sent * 1e-9 or now) if certain else 0.0
        if prefill:
            return Reason.PREFILL
        likely = self._likely() if in_flight else 0.0
        # Compared as `due` answers: a difference of times could come out just below.
        waited = self.linger if now >= self._since + self.linger else 0.0
        found = reason(int(len(certain) + likely + _ROUNDING), threshold, waited, self.linger)
        if found is Reason.LINGER and not certain:
            return None
        if found is None and self._relax and any(r.rid in self._last for r in certain):
            return Reason.RELAX
        return found

    def _likely(self) -> float:
        """Requests that the step in flight is likely to leave here."""
        return sum(r.route.stay_rate for r in self._scheduler.running if r.uncertain and r.due and not r.leaves)
