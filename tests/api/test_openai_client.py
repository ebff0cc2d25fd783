"""The official client against the endpoint."""

from __future__ import annotations

from pathlib import Path

import httpx2
import openai
import pytest

from models.tokenizer import Tokenizer
from tests.api.harness import EOS, Script, serve


async def test_openai_client(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with serve(tmp_path, tokenizer, Script([*"h😀".encode(), EOS]), api_keys=(b"key",)) as api:
        transport = httpx2.AsyncHTTPTransport(uds=str(api.socket))
        async with (
            httpx2.AsyncClient(transport=transport) as http,
            openai.AsyncOpenAI(base_url="http://test/v1", api_key="key", http_client=http, max_retries=0) as client,
        ):
            messages = [{"role": "user", "content": "x"}]
            whole = await client.chat.completions.create(model="demo", messages=messages)
            assert whole.choices[0].message.content == "h😀"
            assert whole.choices[0].finish_reason == "stop"
            assert whole.usage.completion_tokens == 6
            pieces = []
            usage = None
            stream = await client.chat.completions.create(
                model="demo",
                messages=messages,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"return_token_ids": True, "route": {"params": {"threshold": 0.5}}},
            )
            async for chunk in stream:
                usage = chunk.usage or usage
                pieces += [choice.delta.content or "" for choice in chunk.choices]
            assert "".join(pieces) == "h😀"
            assert usage.completion_tokens == 6
            completion = await client.completions.create(model="demo", prompt=[1, 2], max_tokens=1)
            assert completion.choices[0].text == "h"
            assert {model.id async for model in client.models.list()} == {"demo", "small", "large"}
            with pytest.raises(openai.NotFoundError) as missing:
                await client.chat.completions.create(model="nobody", messages=messages)
            assert missing.value.code == "model_not_found"
            with pytest.raises(openai.BadRequestError) as bad:
                await client.chat.completions.create(model="demo", messages=messages, temperature=9)
            assert bad.value.param == "temperature"


async def test_openai_client_sees_the_error_inside_a_stream(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with (
        serve(tmp_path, tokenizer, Script(b"abc", fail_at=2)) as api,
        httpx2.AsyncClient(transport=httpx2.AsyncHTTPTransport(uds=str(api.socket))) as http,
        openai.AsyncOpenAI(base_url="http://test/v1", api_key="-", http_client=http, max_retries=0) as client,
    ):
        stream = await client.completions.create(model="demo", prompt="x", stream=True)
        chunks = aiter(stream)
        received = (await anext(chunks)).choices[0].text + (await anext(chunks)).choices[0].text
        with pytest.raises(openai.APIError, match="the model failed"):
            await anext(chunks)
    assert received == "ab"
