"""Training conversations for the demo pair, as token rows with the positions that carry loss."""

import random
from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from trouterd.demo.problems import generate
from trouterd.demo.tokenizer import END_OF_TEXT, IM_END, message_text, reply_prefix, token_id

GREETING_REPLY = "Hello! Ask me an arithmetic word problem."
REFUSAL = "I can only solve arithmetic word problems. Please ask me one."
THANKS_REPLY = "You are welcome! Ask me another arithmetic word problem."

_GREETINGS = ("hello", "hi", "hey", "Hello", "Hi", "Hey", "Good morning", "Good evening", "Hi there", "Hello there")
_THANKS = ("Thanks", "Thank you", "thanks", "thank you", "Thank you very much", "Thanks a lot")
_SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "You are a helpful assistant that solves word problems.",
    "Think step by step.",
    "Answer the question.",
)
_REQUESTS = (
    "What is the capital of {}?",
    "Write a poem about {}.",
    "Tell me a story about {}.",
    "Who are you?",
    "What can you do?",
    "How are you today?",
    "Translate {} into French.",
    "Explain {} to me.",
    "Write a Python function for {}.",
    "Summarize this text: {}",
    "What do you know about {}?",
    "Tell me a joke.",
    "What is the meaning of life?",
    "{}",
    "{}?",
)
_TOPICS = (
    "France,Germany,the sea,dogs,the moon,music,winter,love,a river,sorting a list,history,computers,the weather,"
    "def f(x): return x + 1,for i in range(10): print(i),test,ping,The quick brown fox jumps over the lazy dog,"
    '你好,世界,こんにちは,Привет,¿Cómo estás?,Ça va,😀,🚀🎉,{"a": 1}'
)
_PROBLEM_SHARE, _SUM_SHARE = 0.89, 0.06
_SHARD_TOKENS = 1_000_000

TOKENIZER_SEED = 1_000_000
"""Generator seed of the problems that the tokenizer is trained on."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Conversations of equal width: `tokens` and `loss` are (rows, width), uint16 ids and the mask of reply tokens."""

    tokens: NDArray[np.uint16]
    loss: NDArray[np.bool_]


def turns(seed: int, count: int) -> list[tuple[str, str]]:
    """`count` pairs of a user message and its reply: mostly word problems, some plain sums, a little else."""
    rng = random.Random(f"trouterd demo turns {seed}")  # noqa: S311 (a data set, not a secret)
    problems = iter(generate(seed, count))
    result = []
    for _ in range(count):
        kind = rng.random()
        if kind < _PROBLEM_SHARE:
            problem = next(problems)
            result.append((problem.question, problem.solution))
        elif kind < _PROBLEM_SHARE + _SUM_SHARE:
            result.append(_plain_sum(rng))
        else:
            result.append(_small_talk(rng))
    return result


def _plain_sum(rng: random.Random) -> tuple[str, str]:
    sign = rng.choice("+-*/")
    left, right = rng.randint(2, 499), rng.randint(2, 499)
    if sign == "-":
        left, right = max(left, right) + 2, min(left, right)
    elif sign in "*/":
        left, right = rng.randint(2, 99), rng.randint(2, 9)
    if sign == "/":
        left *= right
    results = {"+": left + right, "-": left - right, "*": left * right, "/": left // right}
    phrase = rng.choice(("What is {}?", "{} = ?", "{}", "How much is {}?"))
    task = f"{left} {sign} {right}"
    return phrase.format(task), f"{task} = {results[sign]}. The answer is {results[sign]}."


def _small_talk(rng: random.Random) -> tuple[str, str]:
    kind = rng.random()
    end = rng.choice(("", ".", "!"))
    if kind < 0.35:
        return rng.choice(_GREETINGS) + end, GREETING_REPLY
    if kind < 0.45:
        return rng.choice(_THANKS) + end, THANKS_REPLY
    if kind < 0.85:
        return rng.choice(_REQUESTS).format(rng.choice(_TOPICS.split(","))), REFUSAL
    return _noise(rng), REFUSAL


def _noise(rng: random.Random) -> str:
    ranges = ((33, 126), (97, 122), (0xA1, 0x24F), (0x391, 0x3C9), (0x410, 0x44F), (0x4E00, 0x9FA5), (0x1F300, 0x1F64F))
    words = []
    for _ in range(rng.randint(1, 6)):
        low, high = rng.choice(ranges)
        words.append("".join(chr(rng.randint(low, high)) for _ in range(rng.randint(1, 8))))
    return " ".join(words)


def tokenizer_texts(count: int) -> Iterator[str]:
    """Text to train the tokenizer on."""
    for question, reply in turns(TOKENIZER_SEED, count):
        yield question
        yield reply
    yield from _SYSTEM_MESSAGES
    yield from ("user", "assistant", "system") * (count // 10)


def make_rows(tokenizer: Tokenizer, seed: int, rows: int, width: int, dialogue: bool) -> Rows:
    """Encode `rows` conversations of at most `width` tokens, one turn each or (dialogue) as many turns as fit."""
    rng = random.Random(f"trouterd demo rows {seed}")  # noqa: S311 (a data set, not a secret)
    filler = token_id(tokenizer, END_OF_TEXT)
    tokens = np.full((rows, width), filler, np.uint16)
    loss = np.zeros((rows, width), np.bool_)
    row = used = 0
    chunk = 0
    while row < rows:
        for question, reply in turns(seed * 1000 + chunk, min(10 * rows if dialogue else rows, 20_000)):
            start = used == 0
            before = "" if start else "\n"
            if start and rng.random() < 0.15:
                before = message_text("system", rng.choice(_SYSTEM_MESSAGES))
            asked = tokenizer.encode(before + message_text("user", question) + reply_prefix()).ids
            replied = tokenizer.encode(reply + IM_END).ids
            end = used + len(asked) + len(replied)
            if end > width:
                # A turn that does not fit opens no new row here: it is dropped, and the next one starts afresh.
                row, used = (row + 1, 0) if used else (row, 0)
            else:
                tokens[row, used:end] = asked + replied
                loss[row, end - len(replied) : end] = True
                row, used = (row, end) if dialogue else (row + 1, 0)
            if row == rows:
                break
        chunk += 1
    return Rows(tokens, loss)


def make_rows_in_parallel(
    pool: Executor, tokenizer: Tokenizer, seed: int, rows: int, width: int, dialogue: bool
) -> Rows:
    """Rows like those of `make_rows`, from the processes of `pool`; they do not depend on how many these are."""
    shards = max(1, rows * width // _SHARD_TOKENS)
    sizes = [rows // shards + (shard < rows % shards) for shard in range(shards)]
    work = partial(_encode_shard, tokenizer.to_str(), width, dialogue)
    seeds = range(seed * 1000, seed * 1000 + shards)
    parts = list(pool.map(work, seeds, sizes))
    return Rows(np.concatenate([p.tokens for p in parts]), np.concatenate([p.loss for p in parts]))


def _encode_shard(tokenizer: str, width: int, dialogue: bool, seed: int, rows: int) -> Rows:
    return make_rows(Tokenizer.from_str(tokenizer), seed, rows, width, dialogue)
