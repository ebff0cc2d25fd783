"""The prefix cache changes no answer, and keys depend on ids alone (C-25)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

from models.batch import Batch, ModelRunner, StepOutput
from models.tokenizer import Tokenizer
from tests.api.harness import Client
from tests.cases.stack import TEXT, Gate, Stack, blocks, eventually, route, script, tiny
from tests.models.tiny import tiny_qwen3
from trouterd.config import Route

PROMPT_BYTES = 512
OUTPUT = 6
PAGE = 16


class Recorder(Gate):
    """A runner that keeps the logits and the number of rows of every step; its gate never closes by itself."""

    def __init__(self, runner: ModelRunner, *, before: int = -1) -> None:
        super().__init__(runner, before=before)
        self.logits: list[torch.Tensor] = []
        self.rows = 0

    def step(self, batch: Batch) -> StepOutput:
        """The runner's."""
        output = super().step(batch)
        self.rows += len(batch)
        self.logits.append(output.logits.clone())
        return output

    def take(self) -> tuple[torch.Tensor, int]:
        """Logits [R, V] and rows fed since the last call."""
        logits, rows = torch.cat([torch.empty(0, self.vocab_size), *self.logits]), self.rows
        self.logits, self.rows = [], 0
        return logits, rows


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, float32."""
    return tiny_qwen3(tmp_path_factory.mktemp("model"), context=640)


def random_prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Prompts of 512 random bytes; every other one shares its first half with the one before."""
    dice = random.Random(seed)
    prompts: list[list[int]] = []
    for number in range(count):
        prompt = [dice.randrange(256) for _ in range(PROMPT_BYTES)]
        if number % 2:
            prompt[: PROMPT_BYTES // 2] = prompts[-1][: PROMPT_BYTES // 2]
        prompts.append(prompt)
    return prompts


async def greedy(client: Client, prompt: Sequence[int], name: str = "demo", tokens: int = OUTPUT) -> list[int]:
    """Ids of one greedy answer."""
    body = {"model": name, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    status, answer = await client.post(TEXT, body | {"ignore_eos": True, "return_token_ids": True})
    assert status == 200
    ids: list[int] = answer["choices"][0]["token_ids"]
    return ids


def single(runner: ModelRunner, tokenizer: Tokenizer, routes: dict[str, Route] | None = None, **settings: Any) -> Stack:
    """One real model and a script that nobody asks."""
    return Stack({"small": runner, "large": script(b"x")}, routes or {"demo": route()}, tokenizer, **settings)


async def test_c25_answers_with_and_without_the_cache(tmp_path: Path, tokenizer: Tokenizer, model: Path) -> None:
    prompts = random_prompts(16)
    answers: dict[bool, list[tuple[list[int], torch.Tensor]]] = {True: [], False: []}
    fed: dict[bool, list[int]] = {True: [], False: []}
    for cached in (True, False):
        runner = Recorder(tiny(model, num_pages=1024))
        async with single(runner, tokenizer, prefix_cache=cached).serving(tmp_path) as client:
            for prompt in prompts * 2:
                ids = await greedy(client, prompt)
                logits, rows = runner.take()
                answers[cached].append((ids, logits))
                fed[cached].append(rows)
    whole = PROMPT_BYTES + OUTPUT - 1
    assert fed[False] == [whole] * 32
    assert fed[True][:16] == [whole, whole - PROMPT_BYTES // 2] * 8
    # The last token of a prompt is always fed, so its page is not taken from the cache.
    assert fed[True][16:] == [PAGE + OUTPUT - 1] * 16
    for (with_cache, logits), (without, reference) in zip(answers[True], answers[False], strict=True):
        assert with_cache == without
        assert (logits - reference).abs().max() < 1e-4
    assert answers[True][0][0] != answers[True][2][0], "different prompts have different answers"


async def test_c25_abort_in_the_middle_of_a_prefill(tmp_path: Path, tokenizer: Tokenizer, model: Path) -> None:
    """Only pages whose every token has been fed can be used again; the step that ran at the abort counts, it was computed."""
    (prompt,) = random_prompts(1, seed=5)
    async with single(tiny(model), tokenizer, prefix_cache=False).serving(tmp_path) as client:
        alone = await greedy(client, prompt)
    chunk, before = 40, 5
    runner = Recorder(tiny(model), before=before)
    stack = single(runner, tokenizer, max_batch_tokens=chunk)
    async with stack.serving(tmp_path) as client:
        connector = aiohttp.UnixConnector(path=str(client.socket))
        async with aiohttp.ClientSession(connector=connector) as session:
            request = asyncio.create_task(session.post(f"http://test{TEXT}", json={"model": "demo", "prompt": prompt}))
            await runner.reached.wait()
            request.cancel()
            await asyncio.wait({request})
        await eventually(lambda: client.engine.active == 0)
        runner.open()
        await stack.settled()
        runner.take()
        computed = (before + 1) * chunk
        assert stack.small.kv.counts()["cached"] == computed // PAGE
        assert await greedy(client, prompt) == alone
        _, rows = runner.take()
        assert rows == PROMPT_BYTES + OUTPUT - 1 - computed // PAGE * PAGE


@pytest.mark.parametrize("name", ["small", "demo"])
async def test_c25_tokens_of_the_peer_have_the_same_keys(
    tmp_path: Path, tokenizer: Tokenizer, model: Path, name: str
) -> None:
    """A prompt that contains an answer finds all of its pages, whether A sampled it or B wrote half of it; B finds them too."""
    (prompt,) = random_prompts(1, seed=9)
    length, tokens = 40, 62  # the last block is B's
    small, large = Recorder(tiny(model)), Recorder(tiny(model))
    async with Stack({"small": small, "large": large}, blocks(4), tokenizer).serving(tmp_path) as client:
        ids = await greedy(client, prompt[:length], name, tokens)
        longer = [*prompt[:length], *ids, 65]
        reused, answers = [], []
        for side, runner in (("small", small), ("large", large)):
            runner.take()
            answers.append(await greedy(client, longer, side, 1))
            reused.append(len(longer) - runner.take()[1])
    # The last token of an answer is never fed.
    whole = (length + tokens - 1) // PAGE * PAGE
    assert reused == [whole, whole if name == "demo" else 0]
    assert answers[0] == answers[1]
