"""A worker's process in small, for tests that kill it or its ranks: `python -m tests.models.parallel.leading KIND WORLD DEVICE`.

Prints a line of its ranks' pids, "loaded", a line per step of one request that never ends, and last words.
"""

from __future__ import annotations

import asyncio
import os
import sys
from functools import partial
from pathlib import Path

import numpy as np

from models.batch import Batch
from models.device_runner import DeviceRunner
from models.parallel.leader import LeadingDecoder, SplitModel
from models.parallel.ranks import Ranks
from tests.models.parallel import split_hash
from tests.models.parallel.split_hash import PAGES, load, model
from trouterd import logs
from trouterd.worker.split import with_ranks


def say(*words: object) -> None:
    print(*words, flush=True)  # noqa: T201


def decode(split: SplitModel, ranks: Ranks, steps: int) -> int:
    say(Path(f"/proc/self/task/{os.getpid()}/children").read_text())
    leader = LeadingDecoder(split, ranks, load)
    leader.allocate_kv(PAGES)
    say("loaded")
    runner = DeviceRunner(leader, max_slots=1, max_pages=PAGES)
    one, table = np.zeros(1, np.int64), np.arange(PAGES, dtype=np.int32)[None]
    while steps:
        runner.step(Batch(one, one, one, table, one, one))
        say("step")
        steps -= 1
    return 7


async def serve(split: SplitModel, steps: int, ranks: Ranks) -> int:
    return await asyncio.to_thread(decode, split, ranks, steps)


def main(kind: str, world: int, device: str) -> None:
    logs.setup("large", "info", "text")
    with asyncio.Runner() as runner:
        code = runner.run(
            with_ranks(
                partial(serve, model(kind, world, device), 3 if kind == "brief" else -1),
                partial(say, "last words:"),
                "large",
                world,
                log_level="info",
                log_format="text",
                module=split_hash.__name__,
            )
        )
        # As a worker: a thread may still sit in a collective.
        os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
