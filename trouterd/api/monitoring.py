"""GET /health, /ready, /version and /metrics: answered from what this process knows, without any work for the workers."""

from __future__ import annotations

import msgspec
from aiohttp import web

import trouterd
from trouterd import metrics
from trouterd.api.services import SERVICES


async def health(request: web.Request) -> web.Response:
    """Liveness: this process answers. Workers are detail here; /ready judges them."""
    workers = request.app[SERVICES].engine.workers
    answer = {"status": "ok", "workers": workers.report()}
    return web.Response(body=msgspec.json.encode(answer), content_type="application/json")


async def ready(request: web.Request) -> web.Response:
    """200 when every worker is up and new requests are taken, else 503 with the reason."""
    engine = request.app[SERVICES].engine
    fault = "draining" if engine.draining else engine.workers.any_fault()
    answer = {
        "status": "unavailable" if fault else "ready",
        "reason": fault or None,
        "workers": engine.workers.report(),
    }
    return web.Response(status=503 if fault else 200, body=msgspec.json.encode(answer), content_type="application/json")


async def version(request: web.Request) -> web.Response:
    """The daemon's version."""
    del request
    return web.Response(body=msgspec.json.encode({"version": trouterd.__version__}), content_type="application/json")


async def show_metrics(request: web.Request) -> web.Response:
    """Prometheus text: the api's own metrics and those of every worker that answers."""
    services = request.app[SERVICES]
    own = services.engine.metrics.families(services.engine.active)
    page = metrics.merge([*own, *await services.worker_metrics()])
    return web.Response(body=page, headers={"Content-Type": metrics.CONTENT_TYPE})
