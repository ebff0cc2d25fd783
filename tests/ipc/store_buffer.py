"""python -m tests.ipc.store_buffer FENCES ROUNDS TRIALS: store one word, load the other, in two processes at once.

Prints how often neither process saw the other's store, and stops after the first trial in which that happened, or after LIMIT: on
busy cores the two sides wait for each other most of the time.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
from collections.abc import Callable

from ipc.fence import lock_fence, membarrier_fence, no_fence, register_membarrier

# Word indices. Each side has a flag, 512 bytes apart; what it loaded in round n lies at RESULTS + n.
FLAGS = (0, 64)
RESULTS = 1024
LIMIT = 20.0  # seconds
LEADS = (2, 8, 2048)
"""Rounds that one side may be ahead, a different number in each trial: too far ahead, it waits. There is no barrier
between rounds, so that the two sides meet at every distance."""
Fence = Callable[[], None]


def plain_side(words: memoryview, mine: int, other: int, results: int, rounds: int, lead: int) -> None:
    """Nothing between the store and the load: a processor may do the load first."""
    for number in range(1, rounds + 1):
        words[mine] = number
        seen = words[other]
        words[results + number] = seen
        spins = 0
        while seen + lead < number:
            seen = words[other]
            spins += 1
            if spins > 1000:
                os.sched_yield()


def fenced_side(
    words: memoryview, mine: int, other: int, results: int, rounds: int, lead: int, *, fence: Fence
) -> None:
    """The same with a fence between the store and the load."""
    for number in range(1, rounds + 1):
        words[mine] = number
        fence()
        seen = words[other]
        words[results + number] = seen
        spins = 0
        while seen + lead < number:
            seen = words[other]
            spins += 1
            if spins > 1000:
                os.sched_yield()


def run_side(words: memoryview, me: int, rounds: int, lead: int, fence: Fence | None) -> None:
    """One side, on a core of its own where there are two."""
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpus[me % len(cpus)]})
    place = words, FLAGS[me], FLAGS[1 - me], RESULTS + rounds * me - 1, rounds, lead
    if fence is None:
        plain_side(*place)
    else:
        fenced_side(*place, fence=fence)
    os.sched_setaffinity(0, cpus)


def stale_rounds(first: list[int], second: list[int]) -> int:
    """How often neither side saw the other.

    In round n the first side did not yet see the second side's round m = first[n] + 1. With full ordering the second
    side's store of m then came after the first side's store of n, so its load in round m had to see n.
    """
    return sum(m < len(second) and second[m] < n for n, m in ((n, seen + 1) for n, seen in enumerate(first) if n))


def trial(rounds: int, lead: int, fences: tuple[Fence | None, Fence | None], *, register: bool) -> int:
    """Stale rounds of one run of both sides."""
    words = memoryview(mmap.mmap(-1, 8 * (RESULTS + 2 * rounds))).cast("Q")
    child = os.fork()
    if register and not register_membarrier():
        os._exit(3)
    me = 1 if child else 0
    run_side(words, me, rounds, lead, fences[me])
    if not child:
        os._exit(0)
    if os.waitpid(child, 0)[1] != 0:
        raise SystemExit("the other side failed")
    first, second = ([0, *words[start : start + rounds]] for start in (RESULTS, RESULTS + rounds))
    return stale_rounds(first, second)


def main() -> None:
    """Runs up to TRIALS trials."""
    name, rounds, trials = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    # With membarrier only the side that goes to sleep fences; that is the arrangement of the pure-Python ring.
    fences: dict[str, tuple[Fence | None, Fence | None]] = {
        "none": (None, None),
        "lock": (lock_fence(), lock_fence()),
        "membarrier": (no_fence, membarrier_fence()),
    }
    stale = done = 0
    end = time.monotonic() + LIMIT
    while done < trials and not stale and time.monotonic() < end:
        stale = trial(rounds, LEADS[done % len(LEADS)], fences[name], register=name == "membarrier")
        done += 1
    json.dump({"trials": done, "stale": stale}, sys.stdout)


if __name__ == "__main__":
    main()
