"""The supervisor's part of a trace, with workers that only answer."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from trouterd.calls import CallError, Refused
from trouterd.supervisor import tracing
from trouterd.supervisor.fleet import Fleet


class Worker:
    """Answers everything; notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def call(self, verb: str, args: dict[str, Any]) -> None:
        del args
        self.asked.append(verb)


async def test_a_worker_that_is_gone_is_an_answer() -> None:
    """Whoever reads goes on with the other models' events."""

    class Gone(Worker):
        async def call(self, verb: str, args: dict[str, Any]) -> None:
            await super().call(verb, args)
            if verb == "trace-read":
                raise CallError("small died")

    fleet = SimpleNamespace(workers={"small": Gone()}, config=SimpleNamespace(models={"small": None}))
    verbs = tracing.Tracing(cast(Fleet, fleet)).handlers
    number = (await verbs["trace"]({"seconds": 1}, "one"))["trace"]
    assert await verbs["trace-read"]({"trace": number, "model": "small"}, "one") == {"error": "small died"}
    await verbs["trace-end"]({"trace": number}, "one")


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
