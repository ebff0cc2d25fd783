"""What chat and text completions share: from checked fields to a streamed or whole answer."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
from aiohttp import web

from ipc.messages import pack_ids
from trouterd.api.answer import Answer, Delta, TextOptions
from trouterd.api.catalog import Served
from trouterd.api.engine import EngineClient
from trouterd.api.errors import invalid
from trouterd.api.live import Job, LiveRequest
from trouterd.api.sampling import sampling_for, stop_strings
from trouterd.api.schema import RouteOverride, SamplingFields
from trouterd.api.services import REQUEST_ID, SERVICES, STARTED, Services, is_sane_id
from trouterd.api.stops import StopStrings
from trouterd.api.stream import KEEP_ALIVE, EventStream, frame
from trouterd.api.usage import Usage, usage_of

log = logging.getLogger("trouterd.api.request")

MaybeUsage = Usage | None | msgspec.UnsetType


@dataclass(frozen=True, slots=True)
class Plan:
    """A request that has passed every check."""

    request_id: str
    served: Served
    jobs: list[Job]
    text: TextOptions
    params: dict[str, float]
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool


@dataclass(slots=True)
class Collected:
    """A whole choice."""

    answer: Answer
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    writers: bytearray = field(default_factory=bytearray)

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.texts)


class Shape(Protocol):
    """The JSON of one endpoint."""

    def opening(self, index: int, usage: MaybeUsage) -> msgspec.Struct | None:
        """A choice's first chunk, before any text; None for no such chunk."""

    def chunk(self, index: int, delta: Delta, usage: MaybeUsage) -> msgspec.Struct:
        """A choice's next chunk."""

    def usage_chunk(self, usage: Usage) -> msgspec.Struct:
        """The chunk without choices at the end."""

    def whole(self, choices: Sequence[Collected], usage: Usage) -> msgspec.Struct:
        """The answer of a request without streaming."""


def check_choices(engine: EngineClient, fields: SamplingFields, prompts: int, prompt_param: str) -> None:
    """Refuse more choices than could ever run at once; before they cost anything, since a small body can ask for millions.

    Raises:
        RequestError: 400.
    """
    count = prompts * (fields.n or 1)
    if count > engine.max_active:
        param = "n" if fields.n and fields.n > 1 else prompt_param
        raise invalid(f"{count} choices are more than the {engine.max_active} requests that may be active", param)


async def address(services: Services, fields: SamplingFields) -> Served:
    """The route that `model` names. A threshold in the name joins the request's own overrides.

    Raises:
        RequestError: 404, or 400 where the route takes no such threshold.
    """
    served, threshold = services.catalog.address(fields.model)
    if threshold is None:
        return served
    route = fields.route or RouteOverride()
    if "threshold" in route.params:
        raise invalid("route.params: model names a threshold too", "route.params")
    try:
        await services.check_params(served.name, {"threshold": threshold})
    except ValueError as error:
        raise invalid(f"model: {error}", "model") from error
    fields.route = msgspec.structs.replace(route, params=route.params | {"threshold": threshold})
    return served


async def plan_for(
    request: web.Request,
    fields: SamplingFields,
    served: Served,
    prompts: Sequence[Sequence[int]],
    prompt_param: str,
    text: Callable[[int], Awaitable[str]],
) -> Plan:
    """Check everything that is left and lay out the choices: all choices of the first prompt, then of the second ...

    `text` gives what a prompt asks, in words.

    Raises:
        RequestError: 400.
    """
    services = request.app[SERVICES]
    if fields.stream_options is not None and not fields.stream:
        raise invalid("stream_options needs stream=true", "stream_options")
    context = services.catalog.context(served)
    params = await _params(services, served, fields)
    scores = await services.scores.of(served, fields.route or RouteOverride(), params, len(prompts), text)
    jobs = []
    for prompt, score in zip(prompts, scores, strict=True):
        if not prompt:
            raise invalid(f"{prompt_param}: the prompt has no tokens", prompt_param)
        packed = pack_ids(prompt)
        samplings = sampling_for(fields, len(prompt), context, served.tokenizer.vocab_size, prompt_param)
        jobs += [Job(packed, len(prompt), sampling, score) for sampling in samplings]
    stops = stop_strings(fields)
    options = fields.stream_options
    header_given = is_sane_id(request.headers.get("X-Request-Id"))
    if not header_given and is_sane_id(fields.request_id):
        request[REQUEST_ID] = fields.request_id
    return Plan(
        request_id=request[REQUEST_ID],
        served=served,
        jobs=jobs,
        text=TextOptions(
            tokenizer=served.tokenizer,
            models=served.models,
            stops=StopStrings(stops) if stops else None,
            include_stop=bool(fields.include_stop_str_in_output),
            min_tokens=fields.min_tokens or 0,
            skip_special_tokens=fields.skip_special_tokens is not False,
        ),
        params=params,
        stream=bool(fields.stream),
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.include_usage and options.continuous_usage_stats),
        return_token_ids=bool(fields.return_token_ids),
    )


async def _params(services: Services, served: Served, fields: SamplingFields) -> dict[str, float]:
    if fields.route is None or not fields.route.params:
        return {}
    try:
        return await services.check_params(served.name, fields.route.params)
    except ValueError as error:
        raise invalid(f"route.params: {error}", "route.params") from error


async def respond(request: web.Request, plan: Plan, shape: Shape) -> web.StreamResponse:
    """Generate and answer.

    Raises:
        RequestError: the request was not admitted, or failed; a stream that has begun must then end with an error frame.
    """
    engine = request.app[SERVICES].engine
    answers = [Answer(plan.text) for _ in plan.jobs]
    live = engine.submit(
        plan.served, plan.jobs, request_id=plan.request_id, params=plan.params, created=request[STARTED]
    )
    with live:
        try:
            if plan.stream:
                return await _stream(EventStream(request), engine, live, answers, plan, shape)
            choices = await _collect(engine, live, answers)
            whole = shape.whole(choices, usage_of(live, answers))
            return web.Response(body=msgspec.json.encode(whole), content_type="application/json")
        finally:
            _log(live, answers)


async def _collect(engine: EngineClient, live: LiveRequest, answers: Sequence[Answer]) -> list[Collected]:
    choices = [Collected(answer) for answer in answers]
    running = len(choices)
    while running:
        for generation, update in await live.updates():
            choice = choices[generation.index]
            delta = choice.answer.push(update)
            choice.texts.append(delta.text)
            choice.token_ids += delta.token_ids
            choice.writers += delta.writers
            if delta.finish:
                running -= 1
                engine.settle(generation, delta.finish)
    return choices


async def _stream(
    events: EventStream,
    engine: EngineClient,
    live: LiveRequest,
    answers: Sequence[Answer],
    plan: Plan,
    shape: Shape,
) -> web.StreamResponse:
    """One write for everything that has arrived, however many tokens and choices that is."""
    silent: MaybeUsage = None if plan.include_usage else msgspec.UNSET
    # Who asks for ids or counts wants to see tokens that have no text (yet), too.
    shows_tokens = plan.return_token_ids or plan.continuous_usage
    opened = [False] * len(answers)
    running = len(answers)
    while running:
        batch = await live.updates()
        buffer = bytearray(b"" if batch else KEEP_ALIVE)
        for generation, update in batch:
            index = generation.index
            delta = answers[index].push(update)
            usage = usage_of(live, answers) if plan.continuous_usage else silent
            if not opened[index]:
                opened[index] = True
                opening = shape.opening(index, usage)
                if opening is not None:
                    frame(opening, buffer)
            if delta.text or delta.finish or (shows_tokens and delta.token_ids):
                frame(shape.chunk(index, delta, usage), buffer)
            if delta.finish:
                running -= 1
                engine.settle(generation, delta.finish)
        if buffer and running:
            await events.write(buffer)
    if plan.include_usage:
        frame(shape.usage_chunk(usage_of(live, answers)), buffer)
    return await events.finish(buffer)


def _log(live: LiveRequest, answers: Sequence[Answer]) -> None:
    """One line per request, never its text."""
    usage = usage_of(live, answers)
    finishes = [answer.finish or (live.error.code if live.error else "disconnect") for answer in answers]
    log.info(
        "%s finished",
        live.served.name,
        extra={
            "request_id": live.request_id,
            "finish": ",".join(dict.fromkeys(finishes)),
            "choices": len(answers),
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "handoffs": usage.route.handoffs,
            "seconds": round(time.monotonic() - live.created, 4),
        },
    )
