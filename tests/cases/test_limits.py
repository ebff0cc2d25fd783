"""Ids, lengths and tokenizers that do not fit (C-12, C-17a, C-17b, R-5, R-6)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ipc.messages import Message, Submit, unpack_ids
from models.tokenizer import Tokenizer
from tests.api.harness import chat_body
from tests.cases.stack import CHAT, TEXT, VOCAB, Gate, Stack, blocks, route, script, tiny, visits
from tests.models.tiny import BOS, byte_tokenizer, tiny_qwen3
from trouterd.api.catalog import Catalog, TokenizerMismatch
from trouterd.config import Config, Model


def letters(**settings: Any) -> Any:
    return script(b"abcdefghijklmnopqrstuvwxyz" * 8, **settings)


OUTSIDE = [
    (CHAT, chat_body(logit_bias={"999999": 5}), "logit_bias"),
    (CHAT, chat_body(stop_token_ids=[999999]), "stop_token_ids"),
    (CHAT, chat_body(stop_token_ids=[VOCAB]), "stop_token_ids"),
    (TEXT, {"model": "demo", "prompt": [5, 999999]}, "prompt"),
    (TEXT, {"model": "demo", "prompt": [VOCAB]}, "prompt"),
    (TEXT, {"model": "demo", "prompt": [-1]}, "prompt"),
]


async def test_c12_ids_outside_the_vocabulary(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """They are refused by name while a good request, in flight on a model with real embeddings, does not notice."""
    runner = Gate(tiny(tiny_qwen3(tmp_path / "model")), before=3)
    stack = Stack({"small": runner, "large": letters()}, {"demo": route()}, tokenizer)
    async with stack.serving(tmp_path) as client:
        body = {"model": "demo", "prompt": "x", "max_tokens": 8, "temperature": 0, "return_token_ids": True}
        async with client.session.post(f"http://test{TEXT}", json=body | {"stream": True}) as response:
            await runner.reached.wait()
            for path, bad, param in OUTSIDE:
                status, answer = await client.post(path, bad)
                assert (status, answer["error"]["param"]) == (400, param), bad
            runner.open()
            streamed = (await response.read()).decode()
        assert '"finish_reason":"length"' in streamed
        events = [json.loads(line[6:]) for line in streamed.split("\n\n") if line.startswith("data: {")]
        ids = [token for event in events for token in event["choices"][0]["token_ids"]]
        _, again = await client.post(TEXT, body)
        assert again["choices"][0]["token_ids"] == ids
        assert stack.small.stats.submitted == 2


@pytest.mark.parametrize(
    ("length", "fields", "code", "numbers"),
    [
        (64, {}, 400, ("64 tokens; the context of 64",)),
        (60, {"max_tokens": 10}, 400, ("60", "70", "64")),
        (60, {}, 200, ()),
        (60, {"max_tokens": 4}, 200, ()),
    ],
)
@pytest.mark.parametrize("contexts", [(64, 128), (128, 64)], ids=["entry is shorter", "peer is shorter"])
async def test_c17a_context_is_the_smallest_of_the_route(
    tmp_path: Path,
    tokenizer: Tokenizer,
    contexts: tuple[int, int],
    length: int,
    fields: dict[str, int],
    code: int,
    numbers: tuple[str, ...],
) -> None:
    runners = {"small": letters(context_length=contexts[0]), "large": letters(context_length=contexts[1])}
    stack = Stack(runners, visits(2), tokenizer)
    async with stack.serving(tmp_path) as client:
        body = {"model": "demo", "prompt": [1] * length, "ignore_eos": True} | fields
        status, answer = await client.post(TEXT, body)
        assert status == code
        if code == 400:
            assert answer["error"]["code"] == "context_length_exceeded"
            assert all(number in answer["error"]["message"] for number in numbers)
            assert stack.small.stats.submitted == 0
        else:
            assert answer["choices"][0]["finish_reason"] == "length"
            assert answer["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("routes", [visits(1), visits(2), blocks(1), blocks(3)], ids=["v1", "v2", "b1", "b3"])
@pytest.mark.parametrize("length", [63, 62, 60, 49])
async def test_r06_answer_up_to_the_last_position_of_the_shorter_peer(
    tmp_path: Path, tokenizer: Tokenizer, routes: dict[str, Any], length: int
) -> None:
    runners = {"small": letters(context_length=128), "large": letters(context_length=64)}
    async with Stack(runners, routes, tokenizer).serving(tmp_path) as client:
        status, answer = await client.post(TEXT, {"model": "demo", "prompt": [1] * length, "return_token_ids": True})
        assert status == 200
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["choices"][0]["token_ids"] == list(b"abcdefghijklmnopqrstuvwxyz"[: 64 - length])
        assert answer["usage"]["total_tokens"] == 64
        _, alone = await client.post(TEXT, {"model": "small", "prompt": [1] * length})
        assert alone["usage"]["total_tokens"] == 128


@pytest.mark.parametrize("template_bos", [True, False])
@pytest.mark.parametrize("add_bos", [True, False])
async def test_c17b_one_bos(tmp_path: Path, template_bos: bool, add_bos: bool) -> None:
    """Ids as the worker gets them, as /tokenize shows them and as usage counts them."""
    tokenizer = Tokenizer.load(byte_tokenizer(tmp_path / "tok", add_bos=add_bos, template_bos=template_bos))
    stack = Stack({"small": script(b"hi"), "large": script(b"hi")}, {"demo": route()}, tokenizer)
    prompts: list[list[int]] = []

    def watch(_source: int, _target: int, message: Message) -> bool:
        if isinstance(message, Submit):
            prompts.append(unpack_ids(message.prompt).tolist())
        return True

    stack.accept = watch
    async with stack.serving(tmp_path) as client:
        _, chat = await client.chat()
        _, tokenized = await client.post("/tokenize", {"model": "demo", "messages": chat_body()["messages"]})
        _, text = await client.post(TEXT, {"model": "demo", "prompt": "x"})
        _, written = await client.post(TEXT, {"model": "demo", "prompt": "<s>x"})
    assert prompts[0] == tokenized["tokens"] == [*([BOS] if template_bos else []), *b"<u>x</u><a>"]
    assert chat["usage"]["prompt_tokens"] == tokenized["count"] == len(prompts[0])
    assert prompts[1] == [*([BOS] if add_bos else []), *b"x"]
    assert text["usage"]["prompt_tokens"] == len(prompts[1])
    assert prompts[2] == [BOS, *b"x"], "a prompt that spells BOS out gets no second one"
    assert written["usage"]["prompt_tokens"] == 2


def _tokenizer_with(directory: Path, vocabulary: dict[str, int]) -> Tokenizer:
    """ByteTok with another ordinary vocabulary laid over it."""
    path = byte_tokenizer(directory) / "tokenizer.json"
    description = json.loads(path.read_text())
    description["model"]["vocab"] |= vocabulary
    path.write_text(json.dumps(description))
    return Tokenizer.load(directory)


@pytest.mark.parametrize("changed", ["more ids", "other ids"])
def test_r05_tokenizers_that_differ_in_an_ordinary_id(tmp_path: Path, tokenizer: Tokenizer, changed: str) -> None:
    vocabulary = {f"Ġx{n}": n for n in range(258, 300)} if changed == "more ids" else {"A": ord("B"), "B": ord("A")}
    other = _tokenizer_with(tmp_path, vocabulary)
    assert other.first_difference(tokenizer) is not None
    config = Config(
        models={"tiny": Model(path="t"), "grand": Model(path="g")}, routes={"demo": route(models=["tiny", "grand"])}
    )
    with pytest.raises(TokenizerMismatch, match="'tiny' and 'grand'") as refused:
        Catalog(config, {"tiny": tokenizer, "grand": other}, {"tiny": 64, "grand": 64})
    assert f"id {258 if changed == 'more ids' else ord('A')} " in str(refused.value)


async def test_r05_heads_of_different_padded_width_serve_together(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Ids past the tokenizer's are padding: none is ever sampled, however much a head favours it."""
    runners = {
        "small": tiny(tiny_qwen3(tmp_path / "a", vocab=260)),
        "large": tiny(tiny_qwen3(tmp_path / "b", vocab=320, seed=1)),
    }
    async with Stack(runners, blocks(2), tokenizer).serving(tmp_path) as client:
        for seed in range(2):
            body = {"model": "demo", "prompt": "x", "max_tokens": 24, "temperature": 2.0, "seed": seed}
            _, answer = await client.post(TEXT, body | {"ignore_eos": True, "return_token_ids": True})
            (choice,) = answer["choices"]
            assert choice["models"] == ["small", "small", "large", "large"] * 6
            assert max(choice["token_ids"]) < VOCAB
