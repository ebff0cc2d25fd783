"""Calls over a control link, the same at both ends: numbered, answered in any order, never left open."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

from trouterd.control import Call, Frame, Reply


class Refused(Exception):  # noqa: N818 - reads as what it is: "raise Refused(why)"
    """The request is understood and refused (not live, out of range); nothing was changed."""


class CallError(Exception):
    """The other end of a call reported a failure, did not answer in time, or is gone."""


class OpenCalls:
    """The calls of one link that wait for their reply."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}

    async def call(self, send: Callable[[Frame], None], verb: str, args: dict[str, Any] | None) -> Any:
        """Send a call and wait for its reply.

        Raises:
            Refused: the other end refused.
            CallError: it failed, or the link ended.
        """
        number = next(self._numbers)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        try:
            send(Call(id=number, verb=verb, args=args or {}))
            return await answer
        finally:
            del self._answers[number]

    def settle(self, reply: Reply, prefix: str = "") -> None:
        """Hand a reply to its caller; a late one, whose caller gave up, is dropped."""
        answer = self._answers.get(reply.id)
        if answer is None or answer.done():
            return
        if reply.refused:
            answer.set_exception(Refused(reply.error))
        elif reply.error:
            answer.set_exception(CallError(prefix + reply.error))
        else:
            answer.set_result(reply.result)

    def fail(self, message: str) -> None:
        """The link is gone: so are its answers."""
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(CallError(message))


def reply_to(call: Call, outcome: asyncio.Task[Any]) -> Reply:
    """The reply that tells a caller how its handler ended, whatever it was."""
    if outcome.cancelled():
        return Reply(id=call.id, error="cancelled")
    error = outcome.exception()
    if error is None:
        return Reply(id=call.id, result=outcome.result())
    return Reply(id=call.id, error=str(error) or type(error).__name__, refused=isinstance(error, Refused))
