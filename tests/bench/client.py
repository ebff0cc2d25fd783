"""Requests to a target."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp

from bench.target import Target


async def answers(target: Target, count: int = 1, **fields: Any) -> list[dict[str, Any]]:
    """Completions that run at the same time, seeds from 0 on, greedy and with ids unless said otherwise."""
    body = {"model": target.model, "prompt": [100, 101, 102], "temperature": 0, "return_token_ids": True}
    connector = aiohttp.UnixConnector(target.url.removeprefix("unix:"), limit=0)
    async with aiohttp.ClientSession(connector=connector, base_url="http://target") as session:

        async def ask(seed: int) -> dict[str, Any]:
            async with session.post("/v1/completions", json=body | {"seed": seed} | fields) as answer:
                given: dict[str, Any] = await answer.json()
                assert answer.status == 200, given
                return given

        return await asyncio.gather(*map(ask, range(count)))


def written(answer: dict[str, Any]) -> tuple[list[int], list[str], str]:
    """Ids, writers and finish of an answer's one choice."""
    choice = answer["choices"][0]
    return choice["token_ids"], choice["models"], choice["finish_reason"]


async def streamed(target: Target, **fields: Any) -> tuple[str, dict[str, Any]]:
    """Text and usage of one streamed completion."""
    body = {"model": target.model, "prompt": [100, 101, 102], "temperature": 0, "stream": True}
    body |= {"stream_options": {"include_usage": True}} | fields
    connector = aiohttp.UnixConnector(target.url.removeprefix("unix:"))
    text, last = "", b""
    usage: dict[str, Any] = {}
    async with (
        aiohttp.ClientSession(connector=connector, base_url="http://target") as session,
        session.post("/v1/completions", json=body) as answer,
    ):
        async for line in answer.content:
            last = line.strip() or last
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                text += "".join(choice["text"] for choice in event["choices"])
                usage = event.get("usage") or usage
    assert last == b"data: [DONE]"
    return text, usage
