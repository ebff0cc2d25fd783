"""The demo pair behind the demo route: nearly as good as the large model alone, with few of its tokens."""

from __future__ import annotations

import asyncio
from pathlib import Path

import torch

from models.tokenizer import Tokenizer
from models.torch_runner import TorchRunner
from tests.harness import Answer, Cluster
from trouterd.config import Route
from trouterd.demo import LARGE_DIRECTORY, SMALL_DIRECTORY
from trouterd.demo.problems import Problem, final_answer, generate
from trouterd.settings import load

torch.set_num_threads(1)
PROBLEMS = 200
SEED = 77
ROOT = Path(__file__).parents[2]


def runner(directory: Path, vocabulary: int) -> TorchRunner:
    return TorchRunner.load(
        directory,
        device="cpu",
        dtype="float32",
        num_pages=1024,
        page_size=16,
        vocab_size=vocabulary,
        context_length=1024,
    )


async def test_entropy_routing_is_within_a_point_of_the_large_model() -> None:
    tokenizer = Tokenizer.load(SMALL_DIRECTORY)
    config = load(ROOT / "trouterd.toml", {})
    cluster = Cluster(
        {
            name: runner(folder, tokenizer.vocab_size)
            for name, folder in (("small", SMALL_DIRECTORY), ("large", LARGE_DIRECTORY))
        },
        {"demo": Route(models=["small", "large"], algorithm="entropy", params=config.routes["demo"].params)},
        eos_ids=tokenizer.eos_ids,
    )
    problems = list(generate(SEED, PROBLEMS, split="held_out"))
    at_once = asyncio.Semaphore(32)

    async def ask(route: str, problem: Problem) -> Answer:
        async with at_once:
            ids = tokenizer.encode_chat([{"role": "user", "content": problem.question}])
            return await cluster.generate(route, ids, max_tokens=160)

    def right(answers: list[Answer]) -> float:
        texts = [tokenizer.decode(answer.tokens) for answer in answers]
        return sum(final_answer(text) == p.answer for text, p in zip(texts, problems, strict=True)) / PROBLEMS

    async with cluster.running():
        answers = {
            route: await asyncio.gather(*(ask(route, p) for p in problems)) for route in ("small", "demo", "large")
        }
        await cluster.settled()
    accuracy = {route: right(list(found)) for route, found in answers.items()}
    share = sum(sum(a.writers) for a in answers["demo"]) / sum(len(a.tokens) for a in answers["demo"])
    assert accuracy["large"] >= 0.97
    assert accuracy["small"] <= 0.60
    assert accuracy["demo"] >= accuracy["large"] - 0.01
    assert share < 0.15
