"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from aiohttp import web

from trouterd.api.catalog import Catalog, Served
from trouterd.api.services import SERVICES

_STARTED = int(time.time())


def _card(served: Served, catalog: Catalog) -> dict[str, Any]:
    return {
        "id": served.name,
        "object": "model",
        "created": _STARTED,
        "owned_by": "trouterd",
        "root": served.root,
        "parent": None,
        "max_model_len": catalog.context(served),
        "route": {"models": served.models, "algorithm": served.algorithm},
    }


def _json(value: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


async def list_models(request: web.Request) -> web.Response:
    """Every route and every single model."""
    catalog = request.app[SERVICES].catalog
    return _json({"object": "list", "data": [_card(served, catalog) for served in catalog]})


async def show_model(request: web.Request) -> web.Response:
    """One of them."""
    catalog = request.app[SERVICES].catalog
    return _json(_card(catalog.get(request.match_info["name"]), catalog))
