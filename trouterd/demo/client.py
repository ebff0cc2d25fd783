"""A streaming client that keeps what an ordinary OpenAI client drops: which model wrote which token."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

MAX_TOKENS = 128
"""No solution is longer."""


class DemoError(Exception):
    """The daemon could not be reached or refused a request; the text says why."""


@dataclass(slots=True)
class Answer:
    """One streamed answer: its text and, token by token, the id and the name of the model that wrote it."""

    text: str = ""
    tokens: list[tuple[int, str]] = field(default_factory=list)
    handoffs: int = 0

    def share(self, model: str) -> float:
        """The share of tokens that `model` wrote, in 0..1."""
        return sum(writer == model for _, writer in self.tokens) / max(1, len(self.tokens))


class DemoClient:
    """Asks one daemon over its unix socket. Use as an async context manager."""

    def __init__(self, socket_path: str | Path) -> None:
        self._path = str(socket_path)

    async def __aenter__(self) -> "DemoClient":
        connector = aiohttp.UnixConnector(path=self._path, limit=0)
        # A long queue is no fault: only silence on one connection is.
        timeout = aiohttp.ClientTimeout(total=None, sock_read=120)
        self._session = aiohttp.ClientSession("http://trouterd", connector=connector, timeout=timeout)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def ask(self, model: str, question: str, on_tokens: Callable[[Answer], None] | None = None) -> Answer:
        """Ask one question, greedily; `on_tokens` sees the answer whenever it has grown.

        Raises:
            DemoError: no daemon answers, it refuses the request, or its stream breaks off.
        """
        body = {
            "model": model,
            "messages": [{"role": "user", "content": question}],
            "stream": True,
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "return_token_ids": True,
            "stream_options": {"include_usage": True},
        }
        answer = Answer()
        try:
            async with self._session.post("/v1/chat/completions", json=body) as response:
                if response.status != 200:
                    raise DemoError(f"model {model}: HTTP {response.status}: {await response.text()}")
                async for line in response.content:
                    if line.startswith(b"data:") and _take(answer, line[5:].strip()) and on_tokens is not None:
                        on_tokens(answer)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise DemoError(f"no answer from the daemon at {self._path}: {error or type(error).__name__}") from error
        return answer


def _take(answer: Answer, data: bytes) -> bool:
    """Add one server-sent event to the answer; whether it brought tokens."""
    if data == b"[DONE]":
        return False
    chunk = json.loads(data)
    if "error" in chunk:
        raise DemoError(f"the daemon ended the stream: {chunk['error'].get('message', chunk['error'])}")
    route = (chunk.get("usage") or {}).get("route")
    if route is not None:
        answer.handoffs = route["handoffs"]
    grown = False
    for choice in chunk["choices"]:
        answer.text += choice["delta"].get("content") or ""
        tokens = list(zip(choice.get("token_ids") or (), choice.get("models") or (), strict=True))
        answer.tokens += tokens
        grown = grown or bool(tokens)
    return grown
