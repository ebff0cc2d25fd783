"""The aiohttp application: routes, request ids and error answers. Needs no supervisor, rings or sockets."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator

from aiohttp import web
from aiohttp.typedefs import Handler

from trouterd.api import auth, chat, completions, models_routes, monitoring, tokenize
from trouterd.api.errors import RequestError, internal
from trouterd.api.services import REQUEST_ID, SERVICES, STARTED, Services, is_sane_id, new_id
from trouterd.api.stream import EVENTS, EventStream

log = logging.getLogger("trouterd.api")

ID_HEADER = "X-Request-Id"
LAG_INTERVAL = 0.1
"""Seconds between two looks at how late the event loop is."""


def build_app(services: Services, *, max_body_bytes: int = 16 << 20) -> web.Application:
    """The whole endpoint; run it with `handler_cancellation=True`, so that a client's disconnect ends its requests."""
    app = web.Application(middlewares=[answer_errors, auth.require_key, refuse_large], client_max_size=max_body_bytes)
    app[SERVICES] = services
    app.router.add_post("/v1/chat/completions", chat.chat_completions)
    app.router.add_post("/v1/completions", completions.completions)
    app.router.add_get("/v1/models", models_routes.list_models)
    app.router.add_get("/v1/models/{name:.+}", models_routes.show_model)
    app.router.add_post("/tokenize", tokenize.tokenize)
    app.router.add_post("/detokenize", tokenize.detokenize)
    app.router.add_get("/health", monitoring.health)
    app.router.add_get("/ready", monitoring.ready)
    app.router.add_get("/version", monitoring.version)
    app.router.add_get("/metrics", monitoring.show_metrics)
    app.on_response_prepare.append(_stamp)
    app.cleanup_ctx.append(_ticking)
    return app


async def _stamp(request: web.Request, response: web.StreamResponse) -> None:
    # What aiohttp refuses before any middleware, such as an unknown Expect, has no id yet.
    response.headers[ID_HEADER] = request.get(REQUEST_ID) or new_id()
    response.headers["Server"] = "trouterd"


async def _ticking(app: web.Application) -> AsyncIterator[None]:
    """The engine client's periodic work, and the measure of how late the loop is."""
    engine = app[SERVICES].engine

    async def run() -> None:
        ticked = 0.0
        while True:
            pause = min(LAG_INTERVAL, engine.tick_interval)
            due = time.monotonic() + pause
            await asyncio.sleep(pause)
            now = time.monotonic()
            engine.metrics.lags.append(max(0.0, now - due))
            if now - ticked >= engine.tick_interval:
                ticked = now
                engine.tick()

    task = asyncio.create_task(run())
    yield
    task.cancel()
    await asyncio.wait({task})


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn every failure into the OpenAI error object, as a response or as a frame of the stream that has begun."""
    given = request.headers.get(ID_HEADER)
    request[REQUEST_ID] = given if is_sane_id(given) else new_id()
    request[STARTED] = time.monotonic()
    try:
        return await handler(request)
    except ConnectionError:
        if request.transport is not None and not request.transport.is_closing():
            raise
        return web.Response(status=499)  # the client is gone: nobody to tell, and nothing to log
    except RequestError as error:
        return await _answer(request, error)
    except web.HTTPException as error:
        return await _answer(request, _http_error(request, error))
    except web.RequestPayloadError as error:
        reason = " ".join(str(error).split())
        refusal = RequestError(400, "unreadable_body", f"the request body cannot be read: {reason}")
        answer = await _answer(request, refusal)
        answer.force_close()  # where the next request would begin is anybody's guess
        return answer
    except Exception:
        log.exception("%s %s failed", request.method, request.path, extra={"request_id": request[REQUEST_ID]})
        return await _answer(request, internal())


@web.middleware
async def refuse_large(request: web.Request, handler: Handler) -> web.StreamResponse:
    """413 for a body that is announced as too large, before it has come; aiohttp looks at what has come only."""
    announced = request.content_length
    if announced is not None and announced > request.client_max_size:
        raise web.HTTPRequestEntityTooLarge(request.client_max_size, announced)
    return await handler(request)


async def _answer(request: web.Request, error: RequestError) -> web.StreamResponse:
    request.app[SERVICES].engine.metrics.refused[error.code] += 1
    events: EventStream | None = request.get(EVENTS)
    if events is not None and events.started:
        return await events.fail(error)
    return web.Response(status=error.status, body=error.body(), headers=error.headers, content_type="application/json")


def _http_error(request: web.Request, error: web.HTTPException) -> RequestError:
    """What aiohttp itself refuses: paths, methods, sizes."""
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return RequestError(413, "body_too_large", f"the request body is too large: {error.text}")
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        return RequestError(405, "method_not_allowed", f"{request.method} is not allowed on this path; use {allowed}")
    if isinstance(error, web.HTTPNotFound):
        return RequestError(404, "not_found", f"no such path: {request.path[:256]}")
    return RequestError(error.status, "http_error", error.reason)
