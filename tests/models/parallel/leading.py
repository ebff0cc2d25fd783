"""A worker's process in small, for tests that kill it or its ranks: `python -m tests.models.parallel.leading KIND WORLD DEVICE`.

Prints a line of pids, "loaded", and then a line per step of one request that never ends.
"""

from __future__ import annotations

import sys

import numpy as np

from models.batch import Batch
from models.device_runner import DeviceRunner
from models.parallel.leader import LeadingDecoder
from tests.models.parallel import split_hash
from tests.models.parallel.split_hash import PAGES, load, model
from trouterd import logs
from trouterd.worker.rank_processes import RankProcesses


def say(*words: object) -> None:
    print(*words, flush=True)  # noqa: T201


def main(kind: str, world: int, device: str) -> None:
    logs.setup("large", "info", "text")
    processes = RankProcesses(
        "large",
        world,
        log_level="info",
        log_format="text",
        on_loss=lambda line: say("lost", line),
        module=split_hash.__name__,
    )
    say(*processes.pids)
    leader = LeadingDecoder(model(kind, world, device), processes.ranks, load)
    leader.allocate_kv(PAGES)
    say("loaded")
    runner = DeviceRunner(leader, max_slots=1, max_pages=PAGES)
    one, table = np.zeros(1, np.int64), np.arange(PAGES, dtype=np.int32)[None]
    while True:
        runner.step(Batch(one, one, one, table, one, one))
        say("step")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
