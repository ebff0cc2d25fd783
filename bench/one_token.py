"""Calls of Std. Serving: one token of one model, asked of a server of that model as a request of its own."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec

from models.rng import Purpose, key
from trouterd.worker.request import Request


class ServerError(Exception):
    """The server gave no token; `status` is what to tell the client."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class _Choice(msgspec.Struct):
    token_ids: list[int]


class _Answer(msgspec.Struct):
    choices: list[_Choice]


class ModelServer:
    """A server of one model, as an OpenAI client sees it.

    Args:
        model: the `model` of its requests.
        socket: its unix socket.
    """

    def __init__(self, model: str, socket: str) -> None:
        self.model = model
        self._socket = socket
        self._decode = msgspec.json.Decoder(_Answer).decode

    async def __aenter__(self) -> Self:
        connector = aiohttp.UnixConnector(self._socket, limit=0)
        self._session = aiohttp.ClientSession(
            base_url="http://server",
            connector=connector,
            headers={"Content-Type": "application/json"},
            timeout=aiohttp.ClientTimeout(),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def token(self, request: Request) -> int:
        """The token behind all that the request has so far.

        Raises:
            ServerError: there is none.
        """
        try:
            async with self._session.post("/v1/completions", data=msgspec.json.encode(self._body(request))) as answer:
                content = await answer.read()
        except aiohttp.ClientError as error:
            raise ServerError(f"the server of model '{self.model}': {error}", 503) from error
        if answer.status != 200:
            raise ServerError(f"the server of model '{self.model}': {content.decode(errors='replace')}", answer.status)
        return self._decode(content).choices[0].token_ids[0]

    def _body(self, request: Request) -> dict[str, Any]:
        sampling, index = request.submit.sampling, request.output_length
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": request.tokens,
            "max_tokens": 1,
            "temperature": sampling.temperature,
            "ignore_eos": True,  # whether the token ends the answer is decided where the whole answer is known
            "return_token_ids": True,
        }
        if sampling.temperature:
            body |= {"top_p": sampling.top_p, "top_k": sampling.top_k, "min_p": sampling.min_p}
            # To the server each token is the first of an answer, so that one seed would draw them all alike.
            body["seed"] = key(sampling.seed, sampling.choice, index, Purpose.SAMPLE) >> 1
        if index < sampling.min_tokens:
            body |= {"min_tokens": 1, "stop_token_ids": sorted(request.ending_ids)}
        return body
