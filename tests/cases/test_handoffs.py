"""Answers that several models write: ends, equality with one model, seeds (R-3, R-10)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from models.tokenizer import Tokenizer
from tests.api.harness import Client
from tests.cases.stack import TEXT, Stack, blocks, route, script, tiny, visits
from tests.models.tiny import EOS, tiny_qwen3
from trouterd.config import Route


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with random weights."""
    return tiny_qwen3(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("stream", [True, False])
async def test_r03_end_written_by_the_peer(
    tmp_path: Path, tokenizer: Tokenizer, stream: bool, prefix_cache: bool
) -> None:
    runners = {"small": script(b"a" * 64), "large": script([*b"A" * 39, EOS])}
    stack = Stack(runners, visits(4), tokenizer, prefix_cache=prefix_cache)
    async with stack.serving(tmp_path) as client:
        body = {"model": "demo", "prompt": "x", "return_token_ids": True}
        if stream:
            seen = await client.stream(TEXT, body | {"stream_options": {"include_usage": True}})
            text, finish, usage = seen.text(), seen.finishes(), seen.events[-1]["usage"]
        else:
            _, answer = await client.post(TEXT, body)
            (choice,) = answer["choices"]
            text, finish, usage = choice["text"], [choice["finish_reason"]], answer["usage"]
        assert text == ("aaaA" * 10)[:-1]
        assert finish == ["stop"]
        assert usage["completion_tokens"] == 40
        assert usage["route"]["tokens"] == {"small": 30, "large": 10}
        await stack.settled()
        for worker in stack.workers.values():
            counts = worker.kv.counts()
            assert counts["free"] + counts["cached"] == counts["total"]
            assert (counts["cached"] > 0) == prefix_cache
        assert client.engine.metrics.finished == {("stop", "demo"): 1}


async def ids_of(client: Client, name: str, prompt: str, **fields: Any) -> list[list[int]]:
    """Token ids per choice."""
    body = {"model": name, "prompt": prompt, "max_tokens": 24, "return_token_ids": True} | fields
    status, answer = await client.post(TEXT, body)
    assert status == 200, answer
    return [choice["token_ids"] for choice in answer["choices"]]


ROUTES: dict[str, Route] = {
    "null": route("none"),
    "entropy": route("entropy", threshold=0.5),
    "entropy-all": route("entropy", threshold=0.0),
    "rstitch": route("rstitch", tau=0.2),
    "bernoulli": route("bernoulli", p=0.5),
    "visits": visits(3)["demo"],
    "blocks": blocks(5)["demo"],
}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.9, "seed": 1234},
    "filtered": {"temperature": 1.2, "top_p": 0.9, "top_k": 30, "min_p": 0.01, "seed": -5, "n": 2},
    "ends": {"temperature": 1.5, "seed": 3, "min_tokens": 10, "stop_token_ids": list(range(128))},
}


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
async def test_r10_same_ids_as_one_model(
    tmp_path: Path, tokenizer: Tokenizer, model: Path, sampling: dict[str, Any]
) -> None:
    """The null algorithm, and routes whose peer has the same weights; one at a time and all at once."""
    prompts = ["x", "a longer prompt than the other one"]
    stack = Stack({"small": tiny(model), "large": tiny(model)}, ROUTES, tokenizer)
    async with stack.serving(tmp_path) as client:
        alone = {prompt: await ids_of(client, "small", prompt, **sampling) for prompt in prompts}
        for name in ("null", "bernoulli"):
            assert await ids_of(client, name, prompts[0], **sampling) == alone[prompts[0]], name
        jobs = [(name, prompt) for name in (*ROUTES, "large") for prompt in prompts]
        answers = await asyncio.gather(*(ids_of(client, name, prompt, **sampling) for name, prompt in jobs))
        for (name, prompt), ids in zip(jobs, answers, strict=True):
            assert ids == alone[prompt], name
        written = client.engine.metrics.route_tokens
        assert written["null", "large"] == 0
        assert all(written[name, "large"] > 0 for name in ROUTES if name != "null")


@pytest.mark.parametrize("name", ["small", "bernoulli"])
async def test_seeds_are_reproducible(tmp_path: Path, tokenizer: Tokenizer, model: Path, name: str) -> None:
    """Equal seeds give equal ids, whatever else runs; choices differ from each other; no seed means a new one each time."""
    other = tiny_qwen3(tmp_path / "other", seed=1)
    stack = Stack({"small": tiny(model), "large": tiny(other)}, ROUTES, tokenizer)
    async with stack.serving(tmp_path) as client:
        fields = {"temperature": 1.0, "n": 3, "ignore_eos": True}
        first = await ids_of(client, name, "x", seed=7, **fields)
        again, crowded, different, *free = await asyncio.gather(
            ids_of(client, name, "x", seed=7, **fields),
            ids_of(client, name, "x", seed=7, **fields),
            ids_of(client, name, "x", seed=8, **fields),
            ids_of(client, name, "x", **fields),
            ids_of(client, name, "x", **fields),
        )
        assert first == again == crowded
        assert len({tuple(ids) for answer in (first, different, *free) for ids in answer}) == 12
        assert await ids_of(client, name, "x", seed=7, temperature=1.0, ignore_eos=True) == first[:1]
        cold = [await ids_of(client, "entropy", "x", temperature=0, seed=seed, n=2) for seed in range(2)]
        assert cold[0][0] == cold[0][1] == cold[1][0]
