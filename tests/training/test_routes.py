"""Trained heads in the workers: the same tokens by the same models as in the trainer's report."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from models.tokenizer import Tokenizer
from models.torch_runner import TorchRunner
from tests.harness import Cluster
from tests.training.conftest import Trained
from tests.training.pairs import demo_pair
from trouterd.config import Route
from trouterd.demo import LARGE_DIRECTORY, SMALL_DIRECTORY
from trouterd.training.prompts import load_prompts
from trouterd.training.sides import Sides
from trouterd.training.writing import write_routed

NAMES = ("small", "large")


def runner(folder: Path, vocabulary: int) -> TorchRunner:
    return TorchRunner.load(folder, num_pages=256, page_size=16, vocab_size=vocabulary, context_length=512)


async def test_workers_route_as_the_report_does(trained: Trained) -> None:
    pair = demo_pair()
    params: dict[str, dict[str, Any]] = {name: {"checkpoint": str(output)} for name, (output, _) in trained.items()}
    params["query"] |= {"source": "hidden", "threshold": trained["query"][1]["threshold"]}
    prompts = [list(prompt.ids) for prompt in load_prompts("demo:14", pair.tokenizer, 9).all[:6]]
    vocabulary = Tokenizer.load(SMALL_DIRECTORY).vocab_size
    cluster = Cluster(
        {"small": runner(SMALL_DIRECTORY, vocabulary), "large": runner(LARGE_DIRECTORY, vocabulary)},
        {name: Route(models=list(NAMES), algorithm=name, params=given) for name, given in params.items()},
        eos_ids=pair.eos_ids,
    )
    by_large = 0
    async with cluster.running():
        for algorithm, given in params.items():
            answers = await asyncio.gather(*(cluster.generate(algorithm, prompt, max_tokens=128) for prompt in prompts))
            expected = write_routed(pair, prompts, Sides(pair, NAMES, algorithm, given).rule())
            assert [answer.tokens for answer in answers] == [one.ids for one in expected], algorithm
            assert [answer.writers for answer in answers] == [one.by_large for one in expected], algorithm
            by_large += sum(sum(answer.writers) for answer in answers)
        await cluster.settled()
    assert by_large > 0
