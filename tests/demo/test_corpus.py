from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tokenizers import Tokenizer

from trouterd.demo import SMALL_DIRECTORY
from trouterd.demo.corpus import GREETING_REPLY, REFUSAL, make_rows, make_rows_in_parallel, tokenizer_texts, turns
from trouterd.demo.problems import final_answer, split_of
from trouterd.demo.tokenizer import END_OF_TEXT, IM_END, token_id, train_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(SMALL_DIRECTORY / "tokenizer.json"))


def test_turns_are_mostly_problems_and_never_held_out() -> None:
    pairs = turns(1, 1000)
    assert pairs == turns(1, 1000)
    solved = [question for question, reply in pairs if final_answer(reply) is not None]
    assert 900 <= len(solved) < 1000
    assert all(split_of(question) == "train" for question in solved if len(question) > 30)
    assert {GREETING_REPLY, REFUSAL} <= {reply for _, reply in pairs}


def test_loss_covers_exactly_the_replies(tokenizer: Tokenizer) -> None:
    rows = make_rows(tokenizer, seed=2, rows=20, width=192, dialogue=False)
    for tokens, loss in zip(rows.tokens, rows.loss, strict=True):
        whole = tokenizer.decode(tokens.tolist(), skip_special_tokens=False)
        reply = tokenizer.decode(tokens[loss].tolist(), skip_special_tokens=False)
        assert whole.replace(END_OF_TEXT, "").endswith("<|im_start|>assistant\n" + reply)
        assert reply.endswith(IM_END)
        assert reply.count(IM_END) == 1


def test_dialogues_fill_their_rows_with_whole_turns(tokenizer: Tokenizer) -> None:
    rows = make_rows(tokenizer, seed=3, rows=4, width=512, dialogue=True)
    end = token_id(tokenizer, IM_END)
    for tokens, loss in zip(rows.tokens, rows.loss, strict=True):
        used = np.flatnonzero(tokens != token_id(tokenizer, END_OF_TEXT))
        assert len(used) > 512 - 200
        assert (tokens[loss] == end).sum() >= 3
        assert tokens[used[-1]] == end


def test_parallel_rows_do_not_depend_on_the_workers(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trouterd.demo.corpus._SHARD_TOKENS", 2000)
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(3) as three:
        first = make_rows_in_parallel(one, tokenizer, 4, 50, 192, False)
        second = make_rows_in_parallel(three, tokenizer, 4, 50, 192, False)
    assert first.tokens.shape == (50, 192)
    assert np.array_equal(first.tokens, second.tokens)
    assert np.array_equal(first.loss, second.loss)


@pytest.mark.slow
def test_training_the_tokenizer_again_gives_the_committed_one(tokenizer: Tokenizer) -> None:
    assert train_tokenizer(tokenizer_texts(20_000), 1024).to_str() == tokenizer.to_str()
