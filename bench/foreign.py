"""Somebody else's OpenAI server as a system under test, by its URL."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from bench.fetch import fetch
from bench.target import Target


class ForeignError(Exception):
    """The server does not serve such a model; the message names those that it does."""


class _Card(msgspec.Struct):
    id: str


class _Cards(msgspec.Struct):
    data: list[_Card]


def foreign(
    url: str, model: str = "", *, name: str = "", gpus: int = 1, body: Mapping[str, Any] = MappingProxyType({})
) -> Target:
    """A target that says nothing of itself.

    Args:
        url: `http://host:port`, or `unix:/path/of.sock`.
        model: of its `/v1/models`; '' = the first one there.
        name: in tables; '' = the URL.
        gpus: that its answers keep busy.
        body: more fields of every request.

    Raises:
        bench.fetch.FetchError: nobody answers.
        ForeignError: no such model.
    """
    try:
        served = [card.id for card in msgspec.json.decode(fetch(url, "/v1/models"), type=_Cards).data]
    except msgspec.DecodeError as error:
        raise ForeignError(f"{url}: its /v1/models is no list of models: {error}") from error
    if (model and model not in served) or not served:
        raise ForeignError(f"{url}: no model {model!r}; there are {', '.join(served) or 'none'}")
    return Target(name=name or url, url=url, model=model or served[0], gpus=gpus, body=dict(body))
