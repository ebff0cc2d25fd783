"""Whole answers that go to the strong model before anything is computed, or after the weak model's prefill."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ipc.messages import Message, Nack, NackReason, PeerReq, Warm
from models.script import ScriptRunner
from models.torch_runner import TorchRunner
from tests.algorithms.heads import confidence_net, write_confidence
from tests.harness import Answer, Cluster
from tests.models.tiny import tiny_qwen3
from trouterd.config import Route
from trouterd.worker.events import ProcessState

SMALL = [10 + i for i in range(64)]
LARGE = [110 + i for i in range(64)]
SMALL_INDEX, LARGE_INDEX = 0, 1
STRONG, WEAK = 0.9, 0.1
"""Scores above and below the threshold of 0.5."""


def pair(
    *,
    small: dict[str, Any] | None = None,
    large: dict[str, Any] | None = None,
    route: dict[str, Any] | None = None,
    ids: list[int] = LARGE,
    **cluster: Any,
) -> Cluster:
    runners = {
        "small": ScriptRunner(SMALL, vocab_size=258, eos=257, **(small or {})),
        "large": ScriptRunner(ids, vocab_size=258, eos=257, **(large or {})),
    }
    params = {"source": "field", "threshold": 0.5}
    demo = Route(models=["small", "large"], algorithm="query", params=params, **(route or {}))
    return Cluster(runners, {"demo": demo}, **cluster)


def sent(cluster: Cluster) -> list[tuple[int, int, Message]]:
    """Every message that workers send, from now on."""
    seen: list[tuple[int, int, Message]] = []

    def watch(source: int, target: int, message: Message) -> bool:
        seen.append((source, target, message))
        return True

    cluster.accept = watch
    return seen


def handoffs_from(source: int) -> Callable[[int, int, Message], bool]:
    return lambda s, _, message: s == source and isinstance(message, PeerReq)


async def eventually(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


def check(answer: Answer, writer: int, count: int) -> None:
    assert answer.tokens == (SMALL, LARGE)[writer][:count]
    assert answer.writers == [writer] * count


@pytest.mark.parametrize("prefix_cache", [True, False])
async def test_the_strong_model_writes_it_all_and_the_weak_one_computes_nothing(prefix_cache: bool) -> None:
    cluster = pair(prefix_cache=prefix_cache)
    messages = sent(cluster)
    async with cluster.running():
        for _ in range(2):
            answer = await cluster.generate("demo", [1] * 40, score=STRONG, max_tokens=20)
            check(answer, 1, 20)
            assert (answer.finish, answer.handoffs) == ("length", 1)
            await cluster.settled()
        small, large = cluster.workers["small"].stats, cluster.workers["large"].stats
        assert small.fed_rows == 0
        # The prompt's two full pages are known the second time.
        assert large.fed_rows == 2 * (40 + 19) - 32 * prefix_cache
    requests = [m for s, _, m in messages if isinstance(m, PeerReq) and s == SMALL_INDEX]
    assert [(m.submit is not None, m.token_ids, m.loc) for m in requests] == [(True, b"", 0)] * 2
    # Tokens come one by one, not in the end.
    assert sum(isinstance(m, PeerReq) and m.partial for _, _, m in messages) >= 30


async def test_the_weak_model_writes_it_all_and_the_strong_one_never_hears_of_it_but_its_end() -> None:
    cluster = pair()
    messages = sent(cluster)
    async with cluster.running():
        answer = await cluster.generate("demo", [1, 2], score=WEAK, max_tokens=20)
        check(answer, 0, 20)
        await cluster.settled()
        assert cluster.workers["large"].stats.fed_rows == 0
    assert not any(isinstance(message, Warm | PeerReq) for _, _, message in messages)


async def test_equality_and_overrides_of_the_threshold() -> None:
    async with pair().running() as cluster:
        for score, params, writer in [(0.5, {}, 1), (0.1, {"threshold": 0.1}, 1), (0.9, {"threshold": 0.91}, 0)]:
            check(await cluster.generate("demo", [1], params, score, max_tokens=3), writer, 3)


async def test_without_a_score_the_request_ends_with_an_error() -> None:
    async with pair().running() as cluster:
        answer = await cluster.generate("demo", [1])
        assert (answer.finish, answer.tokens) == ("error", [])
        await cluster.settled()


async def test_end_of_answer_and_budget_at_the_strong_model() -> None:
    async with pair(ids=LARGE[:7]).running() as cluster:
        answer = await cluster.generate("demo", [1], score=STRONG)
        assert (answer.tokens, answer.finish, answer.trim) == ([*LARGE[:7], 257], "stop", 1)
        one = await cluster.generate("demo", [1], score=STRONG, max_tokens=1)
        assert (one.tokens, one.finish) == (LARGE[:1], "length")
        await cluster.settled()


@pytest.mark.parametrize("policy", ["fallback", "fail"])
async def test_a_strong_model_that_is_down_or_full_leaves_the_answer_to_the_weak_one(policy: str) -> None:
    async def ask(cluster: Cluster) -> None:
        answer = await cluster.generate("demo", [1, 2], score=STRONG, max_tokens=12)
        if policy == "fail":
            assert (answer.finish, answer.tokens) == ("error", [])
            assert "on_peer_loss" in answer.error
        else:
            check(answer, 0, 12)
        await cluster.settled()

    async with pair(route={"on_peer_loss": policy}).running() as cluster:
        small = cluster.workers["small"]
        small.deliver(ProcessState(LARGE_INDEX, "down"))
        await ask(cluster)
        small.deliver(ProcessState(LARGE_INDEX, "up"))
        # The ring takes nothing.
        cluster.accept = lambda source, _, message: not (source == SMALL_INDEX and isinstance(message, PeerReq))
        await ask(cluster)
        assert small.stats.fallbacks == 2
    # A pool in which the prompt does not even fit beside what a running request has.
    async with pair(route={"on_peer_loss": policy}, large={"num_pages": 4, "page_size": 1}).running() as cluster:
        answer = await cluster.generate("demo", [1] * 8, score=STRONG, max_tokens=12)
        assert answer.finish == ("error" if policy == "fail" else "length")
        assert answer.tokens == ([] if policy == "fail" else SMALL[:12])
        assert cluster.workers["large"].stats.refusals == 1
        await cluster.settled()


async def test_a_restarted_strong_model_gets_the_whole_request_again() -> None:
    async with pair().running() as cluster:
        cluster.hold = handoffs_from(SMALL_INDEX)
        rid, answer = cluster.submit("demo", [1, 2, 3], score=STRONG, max_tokens=6)
        await eventually(lambda: cluster.held)
        cluster.hold = lambda *_: False
        (_, _, message) = cluster.held.pop()
        # What a successor says that does not know the request.
        cluster.deliver(SMALL_INDEX, Nack(rid, LARGE_INDEX, message.handoff_seq, NackReason.STALE))
        await answer.done.wait()
        check(answer, 1, 6)
        # The first hand-off, late: the request has ended.
        cluster.deliver(LARGE_INDEX, message)
        await cluster.settled()
        assert cluster.workers["small"].stats.fed_rows == 0


@pytest.mark.parametrize("state", ["down", "stalled"])
@pytest.mark.parametrize("count", [0, 5])
async def test_a_strong_model_that_is_lost_while_it_writes(state: str, count: int) -> None:
    """The weak one writes on from what has been streamed, and to the end."""
    async with pair(large={"delay_ms": 5}).running() as cluster:
        if count == 0:
            cluster.hold = handoffs_from(SMALL_INDEX)
        _, answer = cluster.submit("demo", [1, 2], score=STRONG, max_tokens=40)
        await (answer.until(count) if count else eventually(lambda: cluster.held))
        cluster.workers["small"].deliver(ProcessState(LARGE_INDEX, state))
        await answer.done.wait()
        written = sum(answer.writers)
        assert answer.writers == [1] * written + [0] * (40 - written)
        assert answer.tokens == LARGE[:written] + SMALL[written:40]
        assert count <= written < 40
        if state == "down":
            # The dead process would not hold it any more.
            cluster.workers["large"].deliver(ProcessState(SMALL_INDEX, "down"))
        cluster.workers["small"].deliver(ProcessState(LARGE_INDEX, "up"))
        await cluster.settled()


async def test_abort_while_the_strong_model_writes() -> None:
    async with pair(large={"delay_ms": 2}).running() as cluster:
        rid, answer = cluster.submit("demo", [1, 2], score=STRONG, max_tokens=60)
        await answer.until(3)
        cluster.abort(rid, "demo")
        await cluster.settled()
        assert cluster.workers["large"].stats.tokens < 60


# Source "hidden"


async def test_hidden_state_of_the_prompt_decides(tmp_path: Path) -> None:
    """Against the head written out in double precision, on the weak model's hidden state of the last prompt token."""
    folders = [tiny_qwen3(tmp_path / name, seed=seed) for seed, name in enumerate(("small", "large"))]
    runners = {
        name: TorchRunner.load(folder, num_pages=64, page_size=8, vocab_size=258)
        for name, folder in zip(("small", "large"), folders, strict=True)
    }
    confidence = write_confidence(tmp_path / "head.pth", confidence_net(runners["small"].hidden_size, seed=3))
    prompts = [[256, n, *range(40, 40 + n)] for n in range(8)]
    scores = [1 - confidence(last_hidden(folders[0], prompt)) for prompt in prompts]
    middle = sorted(scores)[3:5]
    threshold = sum(middle) / 2
    assert middle[1] - middle[0] > 1e-4
    route = Route(
        models=["small", "large"],
        algorithm="query",
        params={"source": "hidden", "checkpoint": str(tmp_path / "head.pth"), "threshold": threshold},
    )
    async with Cluster(runners, {"demo": route}, max_batch_tokens=16).running() as cluster:
        pairs = [cluster.submit("demo", prompt, max_tokens=10, ignore_eos=True) for prompt in prompts]
        singles = [
            [await cluster.generate(name, prompt, max_tokens=10, ignore_eos=True) for name in ("small", "large")]
            for prompt in prompts
        ]
        await asyncio.gather(*(answer.done.wait() for _, answer in pairs))
        await cluster.settled()
    for (_, answer), score, alone in zip(pairs, scores, singles, strict=True):
        strong = int(score >= threshold)
        assert answer.writers == [strong] * 10
        assert answer.tokens == alone[strong].tokens
        assert answer.handoffs == strong


def last_hidden(folder: Path, ids: list[int]) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model.model(input_ids=torch.tensor([ids])).last_hidden_state[0, -1].double()


async def test_after_prefill_a_full_strong_model_leaves_the_first_token_to_the_weak_one(tmp_path: Path) -> None:
    runners = {
        "small": ScriptRunner(SMALL, vocab_size=258, eos=257),
        "large": ScriptRunner(LARGE, vocab_size=258, eos=257, num_pages=4, page_size=1),
    }
    net = confidence_net(runners["small"].hidden_size)
    with torch.no_grad():
        net.linear.weight.zero_()
        net.linear.bias.fill_(math.log(3 / 7))
    write_confidence(tmp_path / "head.pth", net)
    params = {"source": "hidden", "checkpoint": str(tmp_path / "head.pth"), "threshold": 0.69}
    route = Route(models=["small", "large"], algorithm="query", params=params)
    async with Cluster(runners, {"demo": route}).running() as cluster:
        check(await cluster.generate("demo", [1], max_tokens=3), 1, 3)
        check(await cluster.generate("demo", [1] * 8, max_tokens=12), 0, 12)
        check(await cluster.generate("demo", [1], {"threshold": 0.71}, max_tokens=3), 0, 3)
        await cluster.settled()
