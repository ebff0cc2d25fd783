"""python -m tests.ipc.kill_fuzz END CORE KILLS SEED [POINT [LIBRARY]]: kills one end of a ring again and again.

END is the end that gets killed; this process has the other one and plays the supervisor. Without a POINT the kill comes
after a random time. With one, the victim kills itself: in the C core (built as LIBRARY) at the step of that name, in the
pure-Python core at a random store into shared memory (POINT is then "store"). Prints counts as JSON.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import random
import select
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

from ipc import fallback, layout
from ipc.core import Core, load_core
from ipc.eventfd import create_event
from ipc.fallback import Slots, Words
from ipc.layout import RingSpec
from ipc.ring import PushResult, RingConsumer, RingProducer
from ipc.segment import SharedSegment
from tests.ipc.rings import load_variant

SPEC = RingSpec(ring_id=1 << 32 | 2, capacity=1 << 16, max_record=1 << 12, checksum=True)
BATCH = 16
PERIOD = 250  # ms, as the readers' rescue timer
LATE = 20.0  # seconds after which a wake is lost
LOG_WORDS = 1 << 21
MIN_LIFE, MAX_LIFE = 0.001, 0.02  # seconds


def message(number: int) -> bytes:
    """8 bytes to 20 KB, different for every number: mostly small, so that many fit, some in fragments."""
    size = 8 + (number * 7919) % (20_000 if number % 29 == 0 else 400)
    return (number.to_bytes(8, "little") * (size // 8 + 1))[:size]


def read(event: int) -> None:
    """Clears an eventfd."""
    with contextlib.suppress(BlockingIOError):
        os.eventfd_read(event)


class KillingWords:
    """Shared words that kill the process at a chosen store, before it is done."""

    left = 0

    def __init__(self, words: Words) -> None:
        self._words = words

    def __getitem__(self, index: int) -> int:
        return self._words[index]

    def __setitem__(self, index: int, value: int) -> None:
        if KillingWords.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        KillingWords.left -= 1
        self._words[index] = value


class Fuzz:
    """One ring, the ledger of what the victims did, and the counts."""

    def __init__(self, core: Core, kills: int, seed: int, point: str | None) -> None:
        self.core = core
        self.kills = kills
        self.random = random.Random(seed)
        self.point = point
        self.segment = SharedSegment.create(SPEC)
        self.data, self.space = create_event(), create_event()
        self.ledger = memoryview(mmap.mmap(-1, 8 * LOG_WORDS)).cast("Q")
        self.counts = {"kills": 0, "needed_kick": 0, "timer_rescues": 0, "repeats": 0, "most_repeats": 0}

    def fork(self, life: int) -> int:
        """Starts a victim; the pid. It never returns in the child."""
        pid = os.fork()
        if pid:
            return pid
        try:
            self.arm(life)
            self.victim(SharedSegment.from_fd(self.segment.fileno()))
        finally:
            os._exit(17)

    def arm(self, life: int) -> None:
        """Prepares a suicide, if a point is wanted."""
        if self.point == "store":
            KillingWords.left = life
            plain = fallback.open_slots

            def open_slots(memory: memoryview) -> Slots:
                words, halves, data = plain(memory)
                return Slots(KillingWords(words), KillingWords(halves), data)

            fallback.open_slots = open_slots
        elif self.point:
            os.environ["RING_KILL_POINT"] = self.point
            os.environ["RING_KILL_AFTER"] = str(life)

    def victim(self, segment: SharedSegment) -> NoReturn:
        raise NotImplementedError

    def serve(self, pidfd: int, deadline: float) -> None:
        raise NotImplementedError

    def recover(self) -> None:
        raise NotImplementedError

    def run(self) -> dict[str, int]:
        """All kills."""
        for _ in range(self.kills):
            pid = self.fork(self.random.randrange(120 if self.point == "store" else 30))
            pidfd = os.pidfd_open(pid)
            # A victim that kills itself gets time to reach its point, also where it hardly gets a core.
            life = 50.0 if self.point else self.random.uniform(MIN_LIFE, MAX_LIFE)
            self.serve(pidfd, time.monotonic() + life)
            os.kill(pid, signal.SIGKILL)
            status = os.waitpid(pid, 0)[1]
            os.close(pidfd)
            assert os.WIFSIGNALED(status), f"a victim failed by itself: {status}"
            self.counts["kills"] += 1
            self.recover()
        return self.counts

    def sleep(self, event: int, pidfd: int, deadline: float) -> bool:
        """Waits for the event; False when the victim is dead or its time is over."""
        wait = select.poll()
        wait.register(event, select.POLLIN)
        wait.register(pidfd, select.POLLIN)
        left = min(PERIOD, 1000 * (deadline - time.monotonic()))
        ready = dict(wait.poll(max(0, left)))
        if pidfd in ready:
            return False
        if event in ready:
            read(event)
        return time.monotonic() < deadline


class ProducerFuzz(Fuzz):
    """The producer is killed. ledger[0]: how many messages the victims know to be accepted."""

    def __init__(self, core: Core, kills: int, seed: int, point: str | None) -> None:
        super().__init__(core, kills, seed, point)
        self.consumer = RingConsumer(self.segment, self.data, self.space, core=load_core())
        self.expected = 0
        self.unbooked = False

    def victim(self, segment: SharedSegment) -> NoReturn:
        """Sends one message after the other and books each after it was accepted."""
        producer = RingProducer(segment, self.data, self.space, core=self.core)
        wait = select.poll()
        wait.register(self.space, select.POLLIN)
        while True:
            payload = message(self.ledger[0])
            while producer.try_push(payload, 1) is PushResult.FULL:
                if producer.prepare_wait(len(payload)):
                    wait.poll()
                    read(self.space)
            self.ledger[0] += 1

    def handle(self, _: int, view: memoryview) -> None:
        """Whole, in order, and repeated only where a victim died between acceptance and booking."""
        number = int.from_bytes(view[:8], "little")
        assert view == message(number), f"message {number} is torn"
        if number == self.expected - 1 and self.unbooked:
            self.unbooked = False
            self.counts["repeats"] += 1
            return
        assert number == self.expected, f"got message {number}, expected {self.expected}"
        self.expected += 1

    def serve(self, pidfd: int, deadline: float) -> None:
        consumer = self.consumer
        while time.monotonic() < deadline:
            if consumer.poll(self.handle, max_records=BATCH):
                continue
            if consumer.prepare_wait():
                if not self.sleep(self.data, pidfd, deadline):
                    return
                if consumer.pending and not self.is_set():
                    self.counts["timer_rescues"] += self.is_lost(pidfd)

    def is_lost(self, pidfd: int) -> bool:
        """Whether a wake does not come, however long a producer that lives gets no core."""
        end = time.monotonic() + LATE
        while missing := self.consumer.pending > 0 and not self.is_set() and self.alive(pidfd):
            if time.monotonic() > end:
                break
            self.sleep(self.data, pidfd, end)
        return missing

    def is_set(self) -> bool:
        """Whether the consumer's wake has arrived or is not wanted any more."""
        wait = select.poll()
        wait.register(self.data, select.POLLIN)
        return bool(wait.poll(0)) or not self.segment.words[layout.OFF_CONSUMER_WAITING // 8]

    @staticmethod
    def alive(pidfd: int) -> bool:
        """A wake that a dead producer owed is the supervisor's to give."""
        wait = select.poll()
        wait.register(pidfd, select.POLLIN)
        return not wait.poll(0)

    def recover(self) -> None:
        """The supervisor kicks; everything accepted must then be there."""
        wait = select.poll()
        wait.register(self.data, select.POLLIN)
        if self.consumer.pending and not wait.poll(0):
            self.counts["needed_kick"] += 1
        os.eventfd_write(self.data, 1)
        read(self.data)
        while self.consumer.poll(self.handle, max_records=BATCH):
            pass
        booked = self.ledger[0]
        assert self.expected in (booked, booked + 1), f"booked {booked}, received {self.expected}"
        self.unbooked = self.expected == booked + 1

    def run(self) -> dict[str, int]:
        """All kills."""
        counts = super().run()
        return {**counts, "messages": self.expected, "unread": self.consumer.pending}


class ConsumerFuzz(Fuzz):
    """The consumer is killed. ledger[0]: messages handled by victims; their numbers follow."""

    def __init__(self, core: Core, kills: int, seed: int, point: str | None) -> None:
        super().__init__(core, kills, seed, point)
        self.producer = RingProducer(self.segment, self.data, self.space, core=load_core())
        self.sent = 0
        self.ends: list[int] = []
        """Where in the log each victim's life ended."""

    def handle(self, _: int, view: memoryview) -> None:
        number = int.from_bytes(view[:8], "little")
        assert view == message(number), f"message {number} is torn"
        count = self.ledger[0]
        self.ledger[count + 1] = number
        self.ledger[0] = count + 1

    def victim(self, segment: SharedSegment) -> NoReturn:
        """Reads one batch after the other."""
        consumer = RingConsumer(segment, self.data, self.space, core=self.core)
        wait = select.poll()
        wait.register(self.data, select.POLLIN)
        while True:
            if not consumer.poll(self.handle, max_records=BATCH) and consumer.prepare_wait():
                wait.poll()
                read(self.data)

    def serve(self, pidfd: int, deadline: float) -> None:
        while time.monotonic() < deadline and self.ledger[0] < LOG_WORDS - 1000 * self.kills:
            payload = message(self.sent)
            if self.producer.try_push(payload, 1) is not PushResult.FULL:
                self.sent += 1
            elif self.producer.prepare_wait(len(payload)) and not self.sleep(self.space, pidfd, deadline):
                return

    def recover(self) -> None:
        """The next victim reads on; what it repeats is checked at the end."""
        self.ends.append(self.ledger[0])

    def run(self) -> dict[str, int]:
        """All kills, then reads the rest and checks the whole log."""
        counts = super().run()
        with RingConsumer(SharedSegment.from_fd(self.segment.fileno()), self.data, self.space) as consumer:
            while consumer.poll(self.handle):
                pass
        expected = start = 0
        for end in [*self.ends, self.ledger[0]]:
            life = self.ledger[start + 1 : end + 1].tolist()
            start = end
            if not life:
                continue
            assert life == list(range(life[0], life[0] + len(life))), "out of order"
            assert life[0] <= expected, f"message {expected} is lost"
            counts["repeats"] += min(len(life), expected - life[0])
            counts["most_repeats"] = max(counts["most_repeats"], expected - life[0])
            expected = max(expected, life[-1] + 1)
        assert expected == self.sent, f"sent {self.sent}, received {expected}"
        return {**counts, "messages": expected}


def main() -> None:
    """See the module's first lines."""
    end, core_name, kills, seed, *rest = sys.argv[1:]
    point = rest[0] if rest else None
    core = load_variant(Path(rest[1])) if len(rest) > 1 else load_core(core_name)
    fuzz = (ProducerFuzz if end == "producer" else ConsumerFuzz)(core, int(kills), int(seed), point)
    json.dump(fuzz.run(), sys.stdout)


if __name__ == "__main__":
    main()
