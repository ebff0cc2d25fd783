"""A worker's side of dividing a GPU: says what its model takes, and hears how large its KV pool may be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from trouterd.child import Control
from trouterd.memory import GPU_MEMORY, KV_TOKENS, Claim, Memory


async def agree(control: Control, claim: Claim, memory: Callable[[], Mapping[int, Memory]]) -> int:
    """Tokens of the KV pool, once every model that shares a GPU with this one has asked too.

    Args:
        control: the link to the supervisor.
        claim: measured; nothing but the weights is held meanwhile.
        memory: looks at the model's GPUs, by index.

    Raises:
        Refused: the models do not fit; the message says what would.
        CallError: not now: less is free than at the start of the daemon.
    """

    async def answer(args: dict[str, Any]) -> Any:
        del args
        return msgspec.to_builtins(dict(memory()))

    control.handlers[GPU_MEMORY] = answer
    tokens: int = await control.call(KV_TOKENS, {"claim": msgspec.to_builtins(claim)})
    return tokens
