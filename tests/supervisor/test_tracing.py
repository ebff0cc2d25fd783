"""The supervisor's part of a trace, with workers that only answer."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from trouterd.calls import Refused
from trouterd.supervisor import tracing
from trouterd.supervisor.fleet import Fleet


class Worker:
    """Answers everything; notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def call(self, verb: str, args: dict[str, Any]) -> None:
        del args
        self.asked.append(verb)


async def test_the_end_of_a_trace_that_is_over_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever writes a long timeline says nothing meanwhile."""
    worker = Worker()
    fleet = SimpleNamespace(workers={"small": worker}, config=SimpleNamespace(models={"small": None}))
    verbs = tracing.Tracing(cast(Fleet, fleet)).handlers
    monkeypatch.setattr(tracing, "ABANDONED", 0.0)
    number = (await verbs["trace"]({"seconds": 1}, "one"))["trace"]
    while "trace-stop" not in worker.asked:
        await asyncio.sleep(0)
    with pytest.raises(Refused, match="is over"):
        await verbs["trace-left"]({"trace": number}, "one")
    await verbs["trace-end"]({"trace": number}, "one")
    # Of another one's trace it is still no end.
    monkeypatch.setattr(tracing, "ABANDONED", 60.0)
    number = (await verbs["trace"]({"seconds": 1}, "two"))["trace"]
    await verbs["trace-end"]({"trace": number}, "one")
    assert await verbs["trace-left"]({"trace": number}, "two") > 0
    await verbs["trace-end"]({"trace": number}, "two")
    with pytest.raises(Refused, match="is over"):
        await verbs["trace-left"]({"trace": number}, "two")
