"""A control connection to a daemon under test."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.daemon.instance import Instance
from trouterd.control import Call, Reply, pack_frame, read_frame


class Link:
    """Faster than one trouterctl for every call, so that streams are still under way."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def open(cls, instance: Instance) -> Link:
        return cls(*await asyncio.open_unix_connection(str(instance.control)))

    async def call(self, verb: str, **args: Any) -> Reply:
        self.writer.write(pack_frame(Call(id=1, verb=verb, args=args)))
        reply = await read_frame(self.reader)
        assert isinstance(reply, Reply)
        return reply

    async def set(self, key: str, value: Any) -> Reply:
        return await self.call("set", key=key, value=value)

    async def model(self, name: str) -> dict[str, Any]:
        """What a model launches by, when it does not miss the time that it gets to answer."""
        async with asyncio.timeout(30):
            while True:
                shown: dict[str, Any] = (await self.call("batching")).result["models"][name]
                if "error" not in shown:
                    return shown
