"""POST /tokenize and /detokenize: the ids that generation would use."""

from __future__ import annotations

import msgspec
from aiohttp import web

from trouterd.api.catalog import Served
from trouterd.api.errors import invalid
from trouterd.api.prompt import chat_prompt, in_turn, text_prompt
from trouterd.api.sampling import check_ids
from trouterd.api.schema import DetokenizeRequest, TokenizeRequest, decode
from trouterd.api.services import SERVICES, Services


def _served(services: Services, model: str | None) -> Served:
    return services.catalog.default() if model is None else services.catalog.get(model)


async def tokenize(request: web.Request) -> web.Response:
    """Ids of a prompt or of messages."""
    services = request.app[SERVICES]
    fields = decode(await request.read(), TokenizeRequest, services.census)
    served = _served(services, fields.model)
    if (fields.prompt is None) == (fields.messages is None):
        raise invalid("give either prompt or messages", "prompt")
    if fields.messages is not None:
        ids = await chat_prompt(served.tokenizer, fields.messages, fields)
    else:
        add_special = fields.add_special_tokens is not False
        ids = await text_prompt(served.tokenizer, fields.prompt or "", add_special=add_special)
    answer = {"count": len(ids), "max_model_len": services.catalog.context(served), "tokens": ids}
    return web.Response(body=msgspec.json.encode(answer), content_type="application/json")


async def detokenize(request: web.Request) -> web.Response:
    """Text of ids; special tokens are kept unless `skip_special_tokens` asks otherwise."""
    services = request.app[SERVICES]
    fields = decode(await request.read(), DetokenizeRequest, services.census)
    tokenizer = _served(services, fields.model).tokenizer
    ids, skip_special = fields.tokens, bool(fields.skip_special_tokens)

    def decode_ids() -> str:
        check_ids(ids, tokenizer.vocab_size, "tokens")
        return tokenizer.decode(ids, skip_special=skip_special)

    text = await in_turn(len(ids), decode_ids)
    return web.Response(body=msgspec.json.encode({"prompt": text}), content_type="application/json")
