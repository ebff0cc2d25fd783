import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer, Qwen3ForCausalLM

from trouterd.demo import LARGE_DIRECTORY, SMALL_DIRECTORY
from trouterd.demo.corpus import GREETING_REPLY, REFUSAL
from trouterd.demo.problems import generate
from trouterd.demo.report import accuracy, load_model, measure, prompt_ids, report_table, write_answers
from trouterd.demo.tokenizer import CONTEXT_LENGTH, IM_END, message_text, reply_prefix, token_id, train_tokenizer

DIRECTORIES = (SMALL_DIRECTORY, LARGE_DIRECTORY)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(SMALL_DIRECTORY / "tokenizer.json"))


@pytest.fixture(scope="module")
def small() -> Qwen3ForCausalLM:
    return load_model(SMALL_DIRECTORY)


@pytest.fixture(scope="module")
def large() -> Qwen3ForCausalLM:
    return load_model(LARGE_DIRECTORY)


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def config(directory: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return loaded


def test_both_directories_are_complete_and_small() -> None:
    names = {"README.md", "config.json", "generation_config.json", "model.safetensors"}
    names |= {"tokenizer.json", "tokenizer_config.json"}
    for directory in DIRECTORIES:
        assert {path.name for path in directory.iterdir()} == names
    assert sum(path.stat().st_size for directory in DIRECTORIES for path in directory.iterdir()) < 8_000_000


def test_the_pair_shares_tokenizer_template_and_context() -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert digest(SMALL_DIRECTORY / name) == digest(LARGE_DIRECTORY / name)
    for key, value in (("max_position_embeddings", CONTEXT_LENGTH), ("dtype", "bfloat16"), ("vocab_size", 1024)):
        assert {config(directory)[key] for directory in DIRECTORIES} == {value}


@given(st.text())
@example("naïve 😀 👩‍👩‍👧 你好，世界 \u0000 \r\n\t  x = f(1234.5) # ½ ٣")
@settings(max_examples=100, deadline=None)
def test_any_text_survives_the_tokenizer(tokenizer: Tokenizer, text: str) -> None:
    text = text.encode("utf-8", "ignore").decode()
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == text


def test_digits_are_tokens_of_their_own(tokenizer: Tokenizer) -> None:
    pieces = tokenizer.encode("In 12 weeks 345.").tokens
    assert [piece for piece in pieces if any(c.isdigit() for c in piece)] == list("12345")


def test_the_chat_template_writes_what_the_models_were_trained_on(tokenizer: Tokenizer) -> None:
    chat = [
        {"role": "system", "content": "Think step by step."},
        {"role": "user", "content": "What is 2 + 3?"},
        {"role": "assistant", "content": "2 + 3 = 5. The answer is 5."},
        {"role": "user", "content": "hello"},
    ]
    expected = "".join(message_text(message["role"], message["content"]) for message in chat) + reply_prefix()
    theirs = AutoTokenizer.from_pretrained(LARGE_DIRECTORY)
    assert theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == expected
    assert theirs(expected)["input_ids"] == tokenizer.encode(expected).ids
    assert (theirs.eos_token, theirs.eos_token_id) == (IM_END, config(LARGE_DIRECTORY)["eos_token_id"])


def test_the_large_model_lifts_the_small_one(
    tokenizer: Tokenizer, small: Qwen3ForCausalLM, large: Qwen3ForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trouterd.demo.report.THRESHOLDS", (0.1,))
    report = measure(tokenizer, small, large, generate(99, 6, "held_out"))
    assert report.large == 1.0
    assert report.small < 1.0
    assert 0.9 < report.agreement < 1.0
    (point,) = report.frontier
    assert point.accuracy == 1.0
    assert 0 < point.share < 0.2
    assert report_table(report).row_count == 3


def test_answers_are_those_of_generate(tokenizer: Tokenizer, large: Qwen3ForCausalLM) -> None:
    problems = generate(100, 2, "held_out")
    prompts = [prompt_ids(tokenizer, problem.question) for problem in problems]
    answers = write_answers(tokenizer, large, None, prompts)
    assert accuracy(tokenizer, problems, answers) == 1.0
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = large.generate(torch.tensor([prompt]), max_new_tokens=128)
        assert ids[0, len(prompt) :].tolist() == answer.ids


@pytest.mark.parametrize(
    ("message", "reply"), [("hello", GREETING_REPLY), ("Hi!", GREETING_REPLY), ("Write a poem about dogs.", REFUSAL)]
)
def test_other_input_gets_a_short_reply(
    tokenizer: Tokenizer, small: Qwen3ForCausalLM, large: Qwen3ForCausalLM, message: str, reply: str
) -> None:
    for model in (small, large):
        (answer,) = write_answers(tokenizer, model, None, [prompt_ids(tokenizer, message)])
        assert tokenizer.decode(answer.ids) == reply


def test_a_foreign_tokenizer_is_named() -> None:
    foreign = train_tokenizer(["abc"], 300)
    with pytest.raises(ValueError, match="no token '<think>'"):
        token_id(foreign, "<think>")
