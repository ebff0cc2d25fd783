"""The smaller endpoints: models, tokenize, metrics, keys, version (C-17b, R-5)."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from models.tokenizer import Tokenizer
from tests.api.harness import EOS, Script, chat_body, config, serve
from tests.models.tiny import byte_tokenizer
from trouterd import metrics
from trouterd.api.auth import KeyFileError, load_keys
from trouterd.api.catalog import Catalog, TokenizerMismatch

HI = Script([*b"hi", EOS])


async def test_models_are_routes_and_single_models(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with serve(tmp_path, tokenizer, HI, contexts={"small": 128, "large": 64}) as api:
        _, listed = await api.get("/v1/models")
        cards = {card["id"]: card for card in listed["data"]}
        assert list(cards) == ["demo", "small", "large"]
        assert cards["demo"]["root"] == "/models/small"
        assert [cards[name]["max_model_len"] for name in ("demo", "small", "large")] == [64, 128, 64]
        assert cards["demo"]["route"] == {"models": ["small", "large"], "algorithm": "entropy"}
        assert (await api.get("/v1/models/demo"))[1] == cards["demo"]
        status, body = await api.get("/v1/models/org/other")
        assert (status, body["error"]["code"]) == (404, "model_not_found")


async def test_single_models_have_their_own_worker(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with serve(tmp_path, tokenizer, HI) as api:
        for model in ("demo", "small", "large"):
            _, body = await api.chat(model=model)
            assert body["model"] == model
        assert api.workers.entries == ["small", "small", "large"]
        assert [submit.route for submit in api.workers.submits] == ["demo", "small", "large"]


async def test_c17b_one_bos(tmp_path: Path, tokenizer: Tokenizer) -> None:
    messages = chat_body()["messages"]
    async with serve(tmp_path, tokenizer, HI) as api:
        _, tokenized = await api.post("/tokenize", {"model": "demo", "messages": messages})
        _, answer = await api.chat()
        _, text = await api.post("/tokenize", {"prompt": "x"})
        _, bare = await api.post("/tokenize", {"prompt": "x", "add_special_tokens": False})
        _, completion = await api.post("/v1/completions", {"model": "demo", "prompt": "x"})
    assert tokenized["tokens"] == [256, *b"<u>x</u><a>"]
    assert tokenized["count"] == answer["usage"]["prompt_tokens"] == 12
    assert text["tokens"] == [256, *b"x"]
    assert bare["tokens"] == [*b"x"]
    assert completion["usage"]["prompt_tokens"] == 2


async def test_text_parts_are_joined_and_roles_kept(tmp_path: Path, tokenizer: Tokenizer) -> None:
    messages = [
        {"role": "developer", "content": "be"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "name": None},
    ]
    async with serve(tmp_path, tokenizer, HI) as api:
        _, tokenized = await api.post("/tokenize", {"messages": messages})
    assert bytes(tokenized["tokens"][1:]) == b"be<u>ab</u><a>c"


async def test_final_message_is_continued(tmp_path: Path, tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "x"}]
    async with serve(tmp_path, tokenizer, HI) as api:
        for content, kept in ((" once ", b"<u> once "), ("x", b"<u>x")):
            messages = [{"role": "user", "content": "x"}, {"role": "user", "content": content}]
            _, tokenized = await api.post("/tokenize", {"messages": messages, "continue_final_message": True})
            assert bytes(tokenized["tokens"][1:]) == b"<u>x</u><a>" + kept


async def test_long_prompts_are_tokenized_alike(tmp_path: Path, tokenizer: Tokenizer) -> None:
    text = "0123456789" * 3000
    async with serve(tmp_path, tokenizer, HI) as api:
        _, tokenized = await api.post("/tokenize", {"prompt": text, "add_special_tokens": False})
        assert bytes(tokenized["tokens"]).decode() == text
        _, back = await api.post("/detokenize", {"tokens": tokenized["tokens"]})
        assert back["prompt"] == text


async def test_tokenize_refusals(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with serve(tmp_path, tokenizer, HI) as api:
        for path, body, param in (
            ("/tokenize", {}, "prompt"),
            ("/tokenize", {"prompt": "x", "messages": []}, "prompt"),
            ("/tokenize", {"messages": []}, "messages"),
            ("/detokenize", {"tokens": [999999]}, "tokens"),
            ("/detokenize", {}, "tokens"),
        ):
            status, answer = await api.post(path, body)
            assert (status, answer["error"]["param"]) == (400, param)


async def test_keys_cover_all_but_probes(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with serve(tmp_path, tokenizer, HI, api_keys=(b"first", "zweiß".encode())) as api:
        for path in ("/health", "/ready"):
            assert (await api.get(path))[0] == 200
        for path in ("/v1/models", "/version", "/metrics", "/v1/models/demo", "/nowhere"):
            status, body = await api.get(path)
            assert (status, body["error"]["code"]) == (401, "invalid_api_key"), path
        for wrong in ("Bearer", "Bearer ", "Bearer firs", "Bearer first2", "Basic first", "first", "Bearer \xff"):
            assert (await api.get("/v1/models", {"Authorization": wrong}))[0] == 401, wrong
        for right in ("Bearer first", "bearer first"):
            assert (await api.get("/v1/models", {"Authorization": right}))[0] == 200
        status, _ = await api.post("/v1/chat/completions", chat_body())
        assert status == 401
        assert api.workers.submits == []


def test_key_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys"
    file.write_text("one\n\n two \n")
    file.chmod(0o600)
    assert load_keys(str(file)) == (b"one", b"two")
    assert not caplog.records
    file.chmod(0o644)
    with caplog.at_level(logging.WARNING):
        load_keys(str(file))
    assert "chmod 600" in caplog.text
    file.write_text("\n")
    with pytest.raises(KeyFileError, match="holds no key"):
        load_keys(str(file))
    with pytest.raises(KeyFileError, match="cannot be read"):
        load_keys(str(tmp_path / "missing"))
    assert load_keys("") == ()


async def test_metrics_of_api_and_workers(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async def workers() -> list[metrics.Family]:
        return [
            metrics.counter("handoffs", "Hand-offs sent.", [({"source": "small", "destination": "large"}, 5)]),
            metrics.gauge("loop_lag_seconds", "Lag.", [({"model": "small"}, 0.5)]),
        ]

    script = Script([*b"hi", EOS], writer=lambda index: index % 2)
    async with serve(tmp_path, tokenizer, script, worker_metrics=workers) as api:
        await api.chat(n=2)
        await api.chat(max_tokens=2)
        await api.chat(model="nobody")
        async with api.session.get("http://test/metrics") as response:
            assert response.headers["Content-Type"].startswith("text/plain; version=")
            page = await response.text()
    samples = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }
    demo = ("model", "demo")
    assert samples["trouterd_request_success_total", ("finished_reason", "stop"), demo] == 2
    assert samples["trouterd_request_success_total", ("finished_reason", "length"), demo] == 1
    assert samples["trouterd_generation_tokens_total", demo] == 8
    assert samples["trouterd_route_tokens_total", ("model", "small"), ("route", "demo")] == 5
    assert samples["trouterd_route_tokens_total", ("model", "large"), ("route", "demo")] == 3
    assert samples["trouterd_prompt_tokens_total", demo] == 36
    assert samples["trouterd_time_to_first_token_seconds_count", demo] == 3
    assert samples["trouterd_inter_token_latency_seconds_count", demo] == 5
    assert samples["trouterd_e2e_request_latency_seconds_count", demo] == 2
    assert samples["trouterd_requests_refused_total", ("code", "model_not_found")] == 1
    assert samples["trouterd_api_requests_active",] == 0
    assert samples["trouterd_handoffs_total", ("destination", "large"), ("source", "small")] == 5
    assert samples["trouterd_loop_lag_seconds", ("model", "small")] == 0.5
    assert ("trouterd_loop_lag_seconds", ("task", "api")) in samples


async def test_version(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with serve(tmp_path, tokenizer, HI) as api:
        assert (await api.get("/version"))[1]["version"]


def test_r5_tokenizers_of_a_route_must_agree(tmp_path: Path, tokenizer: Tokenizer) -> None:
    other = Tokenizer.load(byte_tokenizer(tmp_path / "other", extra=("<think>",)))
    settings = config()
    with pytest.raises(TokenizerMismatch, match=r"'small' and 'large'.*differ"):
        Catalog(settings, {"small": tokenizer, "large": other}, {"small": 1, "large": 1})
