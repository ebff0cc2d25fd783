"""`python -m tests.supervisor.host CONFIG.json SCRAPE FORCED`: the real supervisor with toy children, in a process of its own.

SCRAPE: seconds that children get to answer for the status and for changes. FORCED: seconds that workers get to end at once.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import msgspec

from trouterd import logs
from trouterd.config import Config
from trouterd.supervisor import supervisor, verbs
from trouterd.supervisor.supervisor import Supervisor

HEAVY = ("torch", "aiohttp", "transformers", "numpy")
ROLES = {"api": "tests.supervisor.roles", "worker": "tests.supervisor.roles"}


LAST_FRAMES = 30.0
"""Seconds: on a busy host it may take long until clients have been told."""


def main(path: Path, scrape: float, forced: float) -> int:
    def read() -> Config:
        return msgspec.json.decode(path.read_bytes(), type=Config)

    async def run() -> int:
        return await Supervisor(read(), modules=ROLES, reload=read).run()

    verbs.SCRAPE_TIMEOUT = scrape
    supervisor.FORCED_EXIT, supervisor.LAST_FRAMES = forced, LAST_FRAMES
    logs.setup("supervisor", "info", "text")
    code = asyncio.run(run())
    found = [name for name in HEAVY if name in sys.modules]
    sys.stderr.write(f"heavy modules: {', '.join(found) or 'none'}\n")
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *map(float, sys.argv[2:])))
