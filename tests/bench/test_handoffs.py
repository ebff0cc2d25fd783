"""The benchmark of hand-offs on a few requests: all of them go to and fro, and every phase is seen."""

from __future__ import annotations

import asyncio

from bench.handoffs import NAMES, PHASES, WARM_UP, Load, hand_to_and_fro, medians, report

LOAD = Load(requests=3, run=2, cycles=5)


def test_every_phase_is_measured() -> None:
    sides = asyncio.run(hand_to_and_fro(LOAD, None))
    handoffs = [side.worker.stats.handoffs for side in sides]
    assert handoffs[1][1, 0] >= LOAD.requests * (WARM_UP + LOAD.cycles)
    assert handoffs[0][0, 1] >= handoffs[1][1, 0]
    # Of its two tokens the entry drops the second one, which the large model writes.
    assert sides[0].worker.stats.tokens * 0.9 <= sides[1].worker.stats.tokens <= sides[0].worker.stats.tokens * 1.1
    for index, found in enumerate(medians(sides)):
        wanted = set(PHASES) - ({"stay"} if index else set())
        assert {phase for phase, seconds in found.items() if seconds > 0} == wanted
    table = report(LOAD, [medians(sides)])
    assert all(name in table for name in NAMES)
