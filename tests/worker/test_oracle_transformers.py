"""Workers with paged KV against the reference loop over transformers' own modelling code, which recomputes every prefix."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from ipc.messages import Sampling
from models.defer import defer_row
from models.tokenizer import vocabulary_size
from models.torch_runner import TorchRunner
from models.transformers_runner import TransformersRunner
from tests.algorithms import reference
from tests.algorithms.reference import Logits
from tests.harness import Cluster
from tests.models.foreign import tiny_foreign
from tests.models.test_defer import deferring
from tests.models.tiny import EOS, tiny_llama, tiny_qwen3
from tests.worker.test_oracle import CASES, NAMES, assert_same, assert_same_handoffs
from trouterd.config import Route

torch.set_num_threads(1)

VOCAB = 258
"""Ids of the tokenizer; the models have two rows more."""
PROMPTS = [[256, *text.encode()] for text in ("Once upon a time", "Once upon a river", "The sum of two")]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "small": tiny_qwen3(folder / "small", seed=1),
        "large": tiny_qwen3(folder / "large", seed=2, layers=3, hidden=48),
        "huge": tiny_llama(folder / "huge", seed=3, tied=False),
    }


@pytest.fixture(scope="module")
def oracles(directories: dict[str, Path]) -> dict[str, Logits]:
    return {name: recomputing(directory) for name, directory in directories.items()}


def recomputing(directory: Path, rows: int = VOCAB) -> Logits:
    """A model of transformers that sees the whole prefix every time; the first `rows` of its logits."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    model.eval()

    def logits(ids: Sequence[int]) -> torch.Tensor:
        with torch.inference_mode():
            return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1, :rows].float()

    return logits


@pytest.fixture
def cluster(directories: dict[str, Path]) -> Callable[..., Cluster]:
    def build(route: Route, copies_of: str = "", **settings: Any) -> Cluster:
        runners = {
            name: TorchRunner.load(directories[copies_of or name], num_pages=128, page_size=8, vocab_size=VOCAB)
            for name in route.models
        }
        return Cluster(runners, {"demo": route}, eos_ids=frozenset({EOS}), **settings)

    return build


SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0, "max_tokens": 24},
    {"temperature": 0.9, "top_p": 0.9, "seed": 77, "max_tokens": 24, "min_tokens": 4},
]


@pytest.mark.parametrize(
    "name",
    [
        "entropy",
        "entropy, back when sure",
        "rstitch",
        "visit 1",
        "visit 5",
        "block 4 of 2",
        "block 1 of 3",
        "bernoulli",
    ],
)
async def test_against_full_recomputation(
    name: str, cluster: Callable[..., Cluster], oracles: dict[str, Logits]
) -> None:
    case = CASES[name]
    async with cluster(case.route(), max_batch_tokens=16).running() as workers:
        jobs = [(prompt, sampling) for prompt in PROMPTS for sampling in SAMPLINGS]
        pairs = [workers.submit("demo", prompt, **sampling) for prompt, sampling in jobs]
        await asyncio.gather(*(answer.done.wait() for _, answer in pairs))
        await workers.settled()
    models = [oracles[model] for model in NAMES[: case.models]]
    handed = 0
    for (prompt, sampling), (rid, answer) in zip(jobs, pairs, strict=True):
        trace = reference.generate(models, case.rule, prompt, Sampling(**({"seed": 0} | sampling)), (EOS,))
        assert_same(answer, trace)
        assert_same_handoffs(workers.trace, rid, trace)
        handed += len(trace.handoffs)
    assert handed, "the rule never handed over: the test shows nothing"


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("name", ["entropy", "rstitch", "visit 1", "block 3 of 3", "bernoulli"])
async def test_copies_of_one_model_write_what_it_writes_alone(
    name: str, prefix_cache: bool, cluster: Callable[..., Cluster], oracles: dict[str, Logits]
) -> None:
    sampling = {"temperature": 0.8, "seed": 9, "max_tokens": 24}
    alone = reference.generate([oracles["small"]], reference.none(), PROMPTS[0], Sampling(**sampling), (EOS,))
    route = CASES[name].route()
    async with cluster(route, copies_of="small", prefix_cache=prefix_cache, max_batch_tokens=64).running() as workers:
        crowd = [workers.submit("demo", PROMPTS[n % 3] + [n], seed=n, max_tokens=12) for n in range(15)]
        answer = await workers.generate("demo", PROMPTS[0], **sampling)
        await asyncio.gather(*(other.done.wait() for _, other in crowd))
        await workers.settled()
    assert answer.tokens == alone.tokens


@pytest.mark.parametrize("mode", ["defer", "compose"])
@pytest.mark.parametrize("tied", [True, False])
async def test_a_model_of_co_llm(tied: bool, mode: str, tmp_path: Path) -> None:
    """Transformers sees the deferral logit as the last one of all, as the model's makers do."""
    directory = deferring(tmp_path / "small", seed=1, tied=tied)
    peer = tiny_qwen3(tmp_path / "large", seed=2, layers=3, hidden=48)
    row = defer_row(directory)
    assert row is not None
    runners = {
        name: TorchRunner.load(path, num_pages=128, page_size=8, vocab_size=vocabulary_size(path))
        for name, path in (("small", directory), ("large", peer))
    }
    own, wide, large = recomputing(directory), recomputing(directory, VOCAB + 1), recomputing(peer)

    def score(ids: Sequence[int]) -> float:
        return float(wide(ids)[VOCAB].double().sigmoid())

    rule = reference.collm(score, 0.4, "linear", 8, own if mode == "compose" else None)
    params = {"threshold": 0.4, "schedule": "linear", "warmup": 8, "mode": mode, "top": VOCAB}
    route = Route(models=["small", "large"], algorithm="collm", params=params)
    workers = Cluster(runners, {"demo": route}, eos_ids=frozenset({EOS}), defer={"small": row})
    async with workers.running():
        jobs = [(prompt, sampling) for prompt in PROMPTS for sampling in SAMPLINGS]
        pairs = [workers.submit("demo", prompt, **sampling) for prompt, sampling in jobs]
        await asyncio.gather(*(answer.done.wait() for _, answer in pairs))
        await workers.settled()
    for (prompt, sampling), (rid, answer) in zip(jobs, pairs, strict=True):
        trace = reference.generate([own, large], rule, prompt, Sampling(**({"seed": 0} | sampling)), (EOS,))
        assert_same(answer, trace)
        assert_same_handoffs(workers.trace, rid, trace)
    assert {writer for _, answer in pairs for writer in answer.writers} == {0, 1}


@pytest.mark.parametrize("name", ["block 4 of 2", "visit 5"])
async def test_architectures_that_transformers_code_runs(name: str, tmp_path: Path) -> None:
    """A small model of ours and a large one of another architecture."""
    case = CASES[name]
    own, foreign = tiny_qwen3(tmp_path / "own", seed=1), tiny_foreign(tmp_path / "foreign", "gpt_neox", seed=2)
    runners = {
        "small": TorchRunner.load(own, num_pages=128, page_size=8, vocab_size=VOCAB),
        "large": TransformersRunner.load(foreign, num_pages=128, page_size=8, vocab_size=VOCAB),
    }
    models = [recomputing(own), recomputing(foreign)]
    workers = Cluster(runners, {"demo": case.route()}, eos_ids=frozenset({EOS}), max_batch_tokens=16)
    async with workers.running():
        jobs = [(prompt, sampling) for prompt in PROMPTS for sampling in SAMPLINGS]
        answers = [workers.submit("demo", prompt, **sampling)[1] for prompt, sampling in jobs]
        await asyncio.gather(*(answer.done.wait() for answer in answers))
        await workers.settled()
    for (prompt, sampling), answer in zip(jobs, answers, strict=True):
        assert_same(answer, reference.generate(models, case.rule, prompt, Sampling(**({"seed": 0} | sampling)), (EOS,)))
    assert {writer for answer in answers for writer in answer.writers} == {0, 1}
