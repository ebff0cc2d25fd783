"""Query routes through the endpoint: scores that clients send, names that carry thresholds, trained models in the api."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from models.tokenizer import Tokenizer
from tests.algorithms.classifiers import tiny_classifier
from tests.api.harness import Client, chat_body
from tests.cases.stack import CHAT, LARGE, SMALL, TEXT, Stack, chunks, eventually, route, script
from trouterd.api.loading import ParamChecks
from trouterd.api.scores import ScoreError, Scores
from trouterd.api.verbs import Verbs
from trouterd.child import Refused
from trouterd.config import Config, Model, Route
from trouterd.worker.events import ProcessState


def stack(tokenizer: Tokenizer, routes: dict[str, Route], **large: Any) -> Stack:
    runners = {"small": script(b"a" * 64), "large": script(b"A" * 64, **large)}
    return Stack(runners, routes, tokenizer)


def field(**params: Any) -> dict[str, Route]:
    return {"demo": route("query", **({"source": "field", "threshold": 0.5} | params)), "plain": route("none")}


async def shares(client: Client, model: str = "demo", **fields: Any) -> dict[str, int]:
    """Tokens per model of an answer of 8."""
    status, answer = await client.post(TEXT, {"model": model, "prompt": "x", "max_tokens": 8} | fields)
    assert status == 200, answer
    used = answer["usage"]["route"]
    assert used["handoffs"] == (used["tokens"]["large"] > 0)
    return used["tokens"]


STRONG, WEAK = {"small": 0, "large": 8}, {"small": 8, "large": 0}


async def test_score_in_the_request(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with stack(tokenizer, field()).serving(tmp_path) as client:
        assert await shares(client, route={"score": 0.5}) == STRONG
        assert await shares(client, route={"score": 0.49}) == WEAK
        assert await shares(client, route={"score": 0.49, "params": {"threshold": 0.4}}) == STRONG
        status, answer = await client.post(CHAT, chat_body(route={"score": 1}, max_tokens=3, n=2))
        assert status == 200
        assert [choice["message"]["content"] for choice in answer["choices"]] == ["AAA", "AAA"]
        body = {"model": "demo", "prompt": ["x", "y"], "max_tokens": 2, "route": {"score": 0.1}}
        assert [choice["text"] for choice in (await client.post(TEXT, body))[1]["choices"]] == ["aa", "aa"]


async def test_threshold_in_the_name(tmp_path: Path, tokenizer: Tokenizer) -> None:
    # A route of that very name comes first.
    routes = field() | {"router-demo-1": route("none"), "my-2-route": route("entropy", threshold=99)}
    async with stack(tokenizer, routes).serving(tmp_path) as client:
        for name, expected in [("router-demo-0.3", STRONG), ("router-demo-0.31", WEAK), ("router-demo-0", STRONG)]:
            assert await shares(client, name, route={"score": 0.3}) == expected
        assert await shares(client, "router-demo-1") == WEAK
        status, answer = await client.post(TEXT, {"model": "router-my-2-route-0", "prompt": "x", "max_tokens": 8})
        assert (status, answer["model"]) == (200, "my-2-route")
        assert answer["usage"]["route"]["tokens"] == STRONG


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({}, "route.score", "missing; route 'demo' decides by it"),
        ({"route": {"score": "high"}}, "route.score", "Expected `float | null`, got `str`"),
        ({"route": {"score": 0.5, "embedding": [1.0]}}, "route.embedding", "route 'demo' does not read one"),
        ({"route": {"score": 0.5, "scores": 1}}, "route.scores", "unknown field"),
        ({"model": "plain", "route": {"score": 0.5}}, "route.score", "route 'plain' does not read one"),
        ({"model": "small", "route": {"score": 0.5}}, "route.score", "route 'small' does not read one"),
        ({"model": "router-plain-0.5"}, "model", "'none' has no parameter 'threshold'"),
        ({"model": "router-demo-high"}, "model", "does not exist"),
        ({"model": "router-other-0.5"}, "model", "does not exist"),
        ({"route": {"score": 0.5, "params": {"threshold": -1}}}, "route.params", ">= 0"),
        (
            {"model": "router-demo-0.5", "route": {"score": 0.5, "params": {"threshold": 1}}},
            "route.params",
            "model names a threshold too",
        ),
    ],
)
async def test_refusals(tmp_path: Path, tokenizer: Tokenizer, fields: dict[str, Any], param: str, words: str) -> None:
    async with stack(tokenizer, field()).serving(tmp_path) as client:
        status, answer = await client.post(TEXT, {"model": "demo", "prompt": "x"} | fields)
        assert status == (404 if "exist" in words else 400)
        assert answer["error"]["param"] == param
        assert words in answer["error"]["message"]


async def test_stream_of_the_strong_model_and_a_client_that_goes_away(tmp_path: Path, tokenizer: Tokenizer) -> None:
    service = stack(tokenizer, field(), delay_ms=5)
    async with service.serving(tmp_path) as client:
        body = {"model": "demo", "prompt": "x", "max_tokens": 60, "stream": True, "route": {"score": 1}}
        async with client.session.post(f"http://test{TEXT}", json=body) as response:
            # Long before the end.
            assert b'"A"' in await chunks(response, 3)
            assert service.large.requests
        await eventually(lambda: not service.large.requests and not service.small.requests)
        assert client.engine.metrics.finished == {("abort", "demo"): 1}
        assert service.large.stats.tokens < 60


async def test_loss_of_the_strong_model_in_the_middle(tmp_path: Path, tokenizer: Tokenizer) -> None:
    service = stack(tokenizer, field(), delay_ms=5)
    async with service.serving(tmp_path) as client:
        body = {"model": "demo", "prompt": "x", "max_tokens": 40, "stream": True, "route": {"score": 1}}
        async with client.session.post(f"http://test{TEXT}", json=body) as response:
            received = await chunks(response, 3)
            service.small.deliver(ProcessState(LARGE, "down"))
            received += await response.read()
        service.large.deliver(ProcessState(SMALL, "down"))
        service.small.deliver(ProcessState(LARGE, "up"))
        assert received.count(b"data: ") >= 5
        assert b'"length"' in received
        assert b'"a' in received
        assert received.rstrip().endswith(b"data: [DONE]")


async def test_matrix_factorisation(tmp_path: Path, tokenizer: Tokenizer) -> None:
    save_file(
        {
            "P.weight": torch.tensor([[2.0, 0.0], [0.0, 5.0], [1.0, 1.0]]),
            "text_proj.0.weight": torch.eye(2),
            "classifier.0.weight": torch.ones(1, 2),
        },
        tmp_path / "mf.safetensors",
    )
    params = {"source": "mf", "checkpoint": str(tmp_path / "mf.safetensors"), "strong": 0, "weak": 1}
    routes = {"demo": route("query", threshold=0.7, **params)}
    service = stack(tokenizer, routes)
    async with service.serving(tmp_path) as client:
        # sigmoid(e[0] - e[1])
        assert await shares(client, route={"embedding": [2.0, 1.0]}) == STRONG
        assert await shares(client, route={"embedding": [1.8, 1.0]}) == WEAK
        swapped = {"embedding": [1.0, 2.0], "params": {"strong": 1, "weak": 0}}
        assert await shares(client, route=swapped) == STRONG
        for given, param, words in [
            ({}, "route.embedding", "missing"),
            ({"embedding": [1.0]}, "route.embedding", "1 numbers, 2 are needed"),
            ({"embedding": [1.7e308, -1.7e308]}, "route.embedding", "too large"),
            (
                {"embedding": [1.0, 2.0], "params": {"strong": 3}},
                "route.params.strong",
                "row 3, but there are 3 models",
            ),
        ]:
            status, answer = await client.post(TEXT, {"model": "demo", "prompt": "x", "route": given})
            assert (status, answer["error"]["param"]) == (400, param)
            assert words in answer["error"]["message"]
        # A live change is refused as a request's own would be.
        checks = ParamChecks(service.config)
        verbs = Verbs(client.engine, service.services.catalog, checks, service.services.scores)
        for strong in (2, 3):
            demo = msgspec.structs.replace(routes["demo"], params=routes["demo"].params | {"strong": strong})
            with contextlib.nullcontext() if strong < 3 else pytest.raises(Refused, match="strong: row 3"):
                await verbs.set({"config": msgspec.structs.replace(service.config, routes={"demo": demo})})


async def test_classifier(tmp_path: Path, tokenizer: Tokenizer) -> None:
    score = tiny_classifier(tmp_path / "classifier")
    easy, hard = sorted(("sum of two", "proof of it all"), key=score)
    assert score(hard) - score(easy) > 1e-3
    params = {"checkpoint": str(tmp_path / "classifier"), "threshold": (score(easy) + score(hard)) / 2}
    service = stack(tokenizer, {"demo": route("query", source="classifier", **params)})
    async with service.serving(tmp_path) as client:
        assert await shares(client, prompt=hard) == STRONG
        assert await shares(client, prompt=easy) == WEAK
        assert await shares(client, prompt=list(hard.encode())) == STRONG
        # The last message of the user alone counts; several prompts are judged one by one.
        turns = [{"role": "user", "content": easy}, {"role": "assistant", "content": easy}]
        for last, text in ((easy, "aa"), (hard, "AA")):
            messages = [*turns, {"role": "user", "content": [{"type": "text", "text": last}]}]
            body = {"model": "demo", "messages": messages, "max_tokens": 2}
            assert (await client.post(CHAT, body))[1]["choices"][0]["message"]["content"] == text
        body = {"model": "demo", "prompt": [easy, hard], "max_tokens": 1}
        assert [choice["text"] for choice in (await client.post(TEXT, body))[1]["choices"]] == ["a", "A"]
        # Such a tokenizer leaves nothing of an empty text to judge.
        body = {"model": "demo", "messages": [{"role": "user", "content": []}]}
        status, answer = await client.post(CHAT, body)
        assert (status, "no tokens" in answer["error"]["message"]) == (400, True)
        # Each text has been asked once.
        assert len(service.services.scores._known) == 2


async def test_texts_that_wait_for_a_slow_classifier(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams go on meanwhile; beyond a limit clients are told to come back."""
    tiny_classifier(tmp_path / "classifier")
    params = {"checkpoint": str(tmp_path / "classifier"), "threshold": 2}
    service = stack(tokenizer, {"demo": route("query", source="classifier", **params), "plain": route("none")})
    monkeypatch.setattr("trouterd.api.scores.MOST_WAITING", 2)
    door = threading.Event()
    scores = service.services.scores
    scores._classifiers[params["checkpoint"]] = lambda text: float(door.wait(50))
    async with service.serving(tmp_path) as client:
        waiting = [asyncio.create_task(shares(client, prompt=text)) for text in "xy"]
        await eventually(lambda: scores._waiting == 2)
        assert await shares(client, "plain") == WEAK
        status, answer = await client.post(TEXT, {"model": "demo", "prompt": "z"})
        assert (status, answer["error"]["code"]) == (429, "overloaded")
        door.set()
        assert await asyncio.gather(*waiting) == [WEAK] * 2
        assert await shares(client, prompt="z") == WEAK


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"source": "classifier"}, "checkpoint: .*nothing-there: no config.json"),
        ({"source": "mf"}, "checkpoint: .*nothing-there: No such file"),
        ({"source": "mf", "strong": "x"}, "'strong': expected `int`, not 'x'"),
    ],
)
def test_checkpoints_that_are_not_there(tmp_path: Path, params: dict[str, Any], words: str) -> None:
    demo = route("query", threshold=0.5, checkpoint=str(tmp_path / "nothing-there"), **params)
    models = {name: Model(path=name) for name in ("small", "large")}
    with pytest.raises(ScoreError, match=f"routes.demo.params: .*{words}"):
        Scores(Config(models=models, routes={"demo": demo}))
