"""A worker with other ranks: it serves until it ends by itself, or until one of them is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from models.parallel.ranks import OTHERS_FIRST, Ranks
from trouterd.logs import LogFormat
from trouterd.worker.rank_processes import BURIAL, GRACE, RankProcesses


async def with_ranks(
    serve: Callable[[Ranks], Awaitable[int]],
    last_words: Callable[[str], None],
    name: str,
    world: int,
    *,
    log_level: str,
    log_format: LogFormat,
    module: str = "trouterd.worker.rank",
) -> int:
    """Start the ranks 1 to world - 1 and serve with them; call it in the main thread.

    Args:
        serve: gives the process's exit code.
        last_words: told which rank is lost, if one is.
        name: the model's.
        world: ranks, this process included.
        log_level: of the others.
        log_format: likewise.
        module: what they run.

    Returns:
        The exit code, 1 when a rank is lost. `serve` may still be waiting for that rank then: end the process.
    """
    loop = asyncio.get_running_loop()
    lost: asyncio.Future[str] = loop.create_future()
    processes = RankProcesses(
        name,
        world,
        log_level=log_level,
        log_format=log_format,
        on_loss=lambda line: loop.call_soon_threadsafe(lost.set_result, line),
        module=module,
    )
    serving = asyncio.ensure_future(serve(processes.ranks))
    ends: list[asyncio.Future[Any]] = [serving, lost]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    if serving.done() and serving.exception() is not None:
        # Most of all because a rank is gone, which is the better thing to say.
        await asyncio.wait({lost}, timeout=OTHERS_FIRST)
    if processes.ranks.lost:
        # The news of which rank it is, and how it ended, is on its way.
        await asyncio.wait({lost}, timeout=BURIAL + GRACE)
    if lost.done():
        last_words(lost.result())
        return 1
    # No loss is one from here on: ranks end as this process does.
    processes.ranks.close()
    return serving.result()
