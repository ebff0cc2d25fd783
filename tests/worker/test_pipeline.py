"""Steps in flight: what is launched ahead, what is not, and what a record that comes late still counts for."""

from __future__ import annotations

import asyncio
import random
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ipc.messages import PeerReq, Sampling
from models.batch import Batch, StepOutput
from models.resident import OWN_TOKEN, StepRecord, StepRows
from models.script import ScriptRunner
from tests.algorithms import reference
from tests.harness import Cluster
from tests.worker.lookup import LookupModel, LookupRunner
from tests.worker.lookup_rows import device_runner
from tests.worker.resident import FakeResident
from tests.worker.test_oracle import MODELS, PROMPT
from trouterd.config import Route
from trouterd.worker import pace, pipeline
from trouterd.worker.gauges import gauges
from trouterd.worker.pipeline import PipelinedStepper
from trouterd.worker.synchronous import SynchronousStepper
from trouterd.worker.worker import DeviceLostError

WANDER = str(Path(reference.__file__).with_name("wander.py"))
SMALL = [10 + i for i in range(64)]
LARGE = [110 + i for i in range(64)]


class Held(FakeResident):
    """Gives as many records as it is told to."""

    def __init__(self, runner: Any, depth: int = 2, **settings: Any) -> None:
        super().__init__(runner, depth, **settings)
        self.allowed = 0

    def poll(self) -> StepRecord | None:
        if not self.allowed or not self.in_flight:
            return None
        self.allowed -= 1
        return super().poll()


def scripted(ids: list[int], **settings: Any) -> ScriptRunner:
    return ScriptRunner(ids, vocab_size=258, eos=257, **settings)


def alone(runner: Any, **settings: Any) -> Cluster:
    return Cluster({"small": runner}, {}, **settings)


def pair(small: Any, large: Any, algorithm: str, route: dict[str, Any] | None = None, **params: Any) -> Cluster:
    demo = Route(models=["small", "large"], algorithm=algorithm, params=params, **(route or {}))
    return Cluster({"small": small, "large": large}, {"demo": demo})


async def eventually(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0)


async def turns(count: int = 30) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


# What is launched


def test_runners_that_keep_decode_state_are_told_from_the_others() -> None:
    runner = LookupRunner(MODELS["small"])
    kinds = [
        type(alone(one).workers["small"].stepper) for one in (runner, FakeResident(runner), device_runner(runner, 2))
    ]
    assert kinds == [SynchronousStepper, PipelinedStepper, PipelinedStepper]


@pytest.mark.parametrize("depth", [1, 2, 3])
async def test_rows_behind_the_first_are_the_devices_own(depth: int) -> None:
    device = FakeResident(scripted(SMALL), depth)
    async with alone(device).running() as cluster:
        answer = await cluster.generate("small", [1, 2, 3], max_tokens=20)
        assert answer.tokens == SMALL[:20]
        await cluster.settled()
    first, *others = device.launched
    assert first.tokens.tolist() == [1, 2, 3]
    assert all(rows.tokens.tolist() == [OWN_TOKEN] for rows in others)
    # Not one row behind the last token of the budget, and the same arrays for the same slots.
    assert len(device.launched) == 20
    assert device.dead_rows == 0
    assert all(rows is others[0] for rows in others)
    assert device.most_in_flight == depth


async def test_a_launch_that_takes_long_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device = FakeResident(scripted(SMALL))
    monkeypatch.setattr(pipeline, "SLOW_LAUNCH", 600.0)
    with caplog.at_level("INFO"):
        async with alone(device).running() as cluster:
            await cluster.generate("small", [1] * 20, max_tokens=2)
            assert "took" not in caplog.text
            monkeypatch.setattr(pipeline, "SLOW_LAUNCH", -1.0)
            await cluster.generate("small", [2] * 17, max_tokens=2)
    assert re.match(r"the launch of a step of 17 rows, 1 of them decided, took \d+\.\d s", caplog.messages[-1])


async def test_work_ahead_of_the_first_step_has_the_thread_of_steps() -> None:
    threads: list[threading.Thread] = []

    class Noted(LookupRunner):
        inline = False

        def step(self, batch: Batch) -> StepOutput:
            threads.append(threading.current_thread())
            return super().step(batch)

    cluster = alone(Noted(MODELS["small"]))
    await cluster.workers["small"].prepare(lambda: threads.append(threading.current_thread()))
    async with cluster.running():
        await cluster.generate("small", PROMPT, max_tokens=2)
    assert len(threads) == 3
    assert len(set(threads)) == 1
    assert threads[0] is not threading.main_thread()


async def test_nothing_is_committed_before_its_record() -> None:
    device = Held(scripted(SMALL, page_size=2))
    async with alone(device).running() as cluster:
        rid, answer = cluster.submit("small", [1, 2, 3, 4, 5], max_tokens=10)
        await eventually(lambda: device.in_flight == 2)
        await turns()
        worker = cluster.workers["small"]
        request = worker.requests[rid]
        assert (request.fed, len(request.tokens), answer.tokens) == (6, 5, [])
        assert len(worker.kv._prefixes) == 0
        cluster.submit("small", [1, 2, 3, 4, 6], max_tokens=10)
        await turns()
        device.allowed = 1
        await answer.until(1)
        await eventually(lambda: len(device.launched) == 3)
        assert (request.fed, len(request.tokens)) == (7, 6)
        # The prompt's two full pages are known now, and the second request takes them over.
        assert len(worker.kv._prefixes) == 2
        assert device.launched[2].tokens.tolist() == [OWN_TOKEN, 6]
        device.allowed = 10**6
        await answer.done.wait()
        await cluster.settled()


async def test_row_behind_the_end_of_an_answer_is_dead_and_its_page_is_given_back() -> None:
    device = FakeResident(scripted(SMALL[:6], page_size=1))
    async with alone(device).running() as cluster:
        answer = await cluster.generate("small", [1], max_tokens=40)
        assert answer.tokens == [*SMALL[:6], 257]
        assert device.dead_rows == 1
        await cluster.settled()
        assert cluster.workers["small"].stats.fed_rows == 7


@pytest.mark.parametrize("page_size", [1, 3, 4])
async def test_each_side_publishes_every_page_that_it_has_filled(page_size: int) -> None:
    runners = [FakeResident(scripted(ids, page_size=page_size)) for ids in (SMALL, LARGE)]
    async with pair(*runners, "bernoulli", p=0.3).running() as cluster:
        prompt = [1, 2, 3, 4, 5]
        answer = await cluster.generate("demo", prompt, max_tokens=30, seed=5)
        await cluster.settled()
        assert len(set(answer.writers)) == 2
        for side, worker in enumerate(cluster.workers.values()):
            # Whoever writes a token has been fed all before it.
            fed = len(prompt) + max(n for n, writer in enumerate(answer.writers) if writer == side)
            assert len(worker.kv._prefixes) >= fed // page_size


async def test_requests_that_arrive_join_the_next_launched_step() -> None:
    device = Held(scripted(SMALL))
    async with alone(device).running() as cluster:
        first = cluster.submit("small", [1, 2], max_tokens=30)[1]
        await eventually(lambda: device.in_flight == 2)
        second = cluster.submit("small", [3, 4, 5], max_tokens=30)[1]
        await turns()
        assert len(device.launched) == 2
        device.allowed = 1
        await eventually(lambda: len(device.launched) == 3)
        assert device.launched[2].tokens.tolist() == [OWN_TOKEN, 3, 4, 5]
        assert device.launched[2].logit_rows.tolist() == [0, 3]
        device.allowed = 10**6
        await first.done.wait()
        await second.done.wait()
        assert first.tokens == second.tokens == SMALL[:30]
        await cluster.settled()


async def test_abort_while_rows_are_in_flight_lets_the_slot_go_at_once() -> None:
    device = Held(LookupRunner(MODELS["small"], num_pages=6, page_size=4, context_length=24))
    async with alone(device, max_slots=1).running() as cluster:
        rid, gone = cluster.submit("small", PROMPT, max_tokens=16, ignore_eos=True)
        await eventually(lambda: device.in_flight == 2)
        cluster.abort(rid, "small")
        answer = cluster.submit("small", PROMPT[::-1], max_tokens=16, ignore_eos=True)[1]
        await turns()
        # Slot and pages are the new request's before the old one's steps have run.
        assert cluster.workers["small"].scheduler.counts()["waiting"] + len(device.launched) == 3
        device.allowed = 10**6
        await answer.done.wait()
        assert not gone.tokens
        whole = reference.generate(
            [MODELS["small"]], reference.none(), PROMPT[::-1], Sampling(0, 16, 0.0, ignore_eos=True)
        )
        assert answer.tokens == whole.tokens
        await cluster.settled()


async def test_a_step_of_rows_that_tend_to_leave_is_not_queued_ahead() -> None:
    """Visits of one token: the large model would run a dead step behind each of them."""
    small = FakeResident(scripted(SMALL * 4), patience=3)
    large = FakeResident(scripted(LARGE * 4), patience=3, seconds=0.02)
    async with pair(small, large, "every_n", shape="visit", n=2).running() as cluster:
        answer = await cluster.generate("demo", [1, 2], max_tokens=100)
        assert answer.writers == [0, 1] * 50
        await cluster.settled()
    assert large.dead_rows <= 3
    # Short steps are worth the chance.
    assert small.dead_rows > 5


async def test_rows_that_tend_to_leave_are_not_fed_behind_others() -> None:
    """Visits of one token, of requests in all phases: whoever comes joins the next step, those of the one before it do not."""
    small = FakeResident(scripted(SMALL * 4), patience=3)
    large = FakeResident(scripted(LARGE * 4), patience=40)
    async with pair(small, large, "bernoulli", p=0.4).running() as cluster:
        await asyncio.gather(*(cluster.generate("demo", [1, 2 + n], max_tokens=200) for n in range(8)))
        await cluster.settled()
    assert large.most_in_flight == 2
    assert large.dead_rows <= 73  # until the route's rate is known to be below a tenth


async def test_rows_that_stay_against_all_odds_have_waited() -> None:
    """The request was kept out of the step behind the one that it stays after."""
    small = Held(scripted(SMALL))
    async with pair(small, scripted(LARGE), "every_n", shape="visit", n=9).running() as cluster:
        worker = cluster.workers["small"]
        worker.routes["demo"].stay_rate = 0.0
        routed = cluster.submit("demo", [1], max_tokens=8)[1]
        single = cluster.submit("small", [2], max_tokens=8)[1]
        await eventually(lambda: small.in_flight == 2)
        assert [len(rows) for rows in small.launched] == [2, 1]
        small.allowed = 1
        await eventually(lambda: len(small.launched) == 3)
        assert len(small.launched[2]) == 2
        # The other one's rows were queued before its token was known.
        waits = worker.stats.stay_seconds
        assert sum(waits.counts) == 3
        assert waits.sum > 0
        waited = waits.sum
        small.allowed = 1
        await eventually(lambda: len(small.launched) == 4)
        assert (sum(waits.counts), waits.sum) == (5, waited)
        small.allowed = 10**6
        await routed.done.wait()
        await single.done.wait()
        await cluster.settled()


async def test_a_step_that_ends_early_when_it_is_dead_is_queued_ahead() -> None:
    """With every second row handed over the chance of a live row is worth a step that is over at once otherwise."""
    dead = {}
    for skipped in (0, 8):
        small = FakeResident(scripted(SMALL * 4), patience=3, seconds=0.002)
        small.skipped = skipped
        async with pair(small, FakeResident(scripted(LARGE * 4)), "bernoulli", p=0.5).running() as cluster:
            await cluster.generate("demo", [1, 2], max_tokens=120)
            await cluster.settled()
            stepper = cluster.workers["small"].stepper
            assert isinstance(stepper, PipelinedStepper)
            # Dead steps, which are over at once, say nothing of live ones.
            assert stepper._pace.expected(1) == 0.002
        dead[skipped] = small.dead_rows
    assert dead[0] <= 5
    assert dead[8] > 20


@pytest.mark.parametrize("skipped", [0, 8])
async def test_a_step_that_is_skipped_is_not_slept_through(skipped: int) -> None:
    small = Held(scripted(SMALL, page_size=1), seconds=0.02)
    small.skipped = skipped
    async with pair(small, scripted(LARGE), "every_n", shape="visit", n=2).running() as cluster:
        answer = cluster.submit("demo", [1], max_tokens=4)[1]
        stepper = cluster.workers["small"].stepper
        assert isinstance(stepper, PipelinedStepper)
        small.allowed = 1
        await eventually(lambda: len(small.launched) == 3)
        assert stepper.nap(stepper.started) > 0.01  # its row may stay
        small.allowed = 1
        await eventually(lambda: [m for m in cluster.trace if m.source == 0])
        assert small.in_flight == 1
        assert (stepper.nap(stepper.started) == 0) is (skipped > 0)
        small.allowed = 10**6
        await answer.done.wait()
        assert answer.writers == [0, 1] * 2
        await cluster.settled()


async def test_a_step_whose_requests_were_aborted_runs_and_is_slept_through() -> None:
    """The device does not hear of it before that step's end."""
    device = Held(scripted(SMALL), seconds=0.02)
    device.skipped = 8
    async with alone(device).running() as cluster:
        worker = cluster.workers["small"]
        submitted = [cluster.submit("small", [1, n], max_tokens=50) for n in range(2)]
        device.allowed = 2
        await eventually(lambda: worker.stepper.steps == 2)
        await eventually(lambda: device.in_flight == 1)
        for rid, _ in submitted:
            cluster.abort(rid, "small")
        await eventually(lambda: not worker.requests)
        assert worker.stepper.nap(worker.stepper.started) > 0.01
        device.allowed = 10**6
        await eventually(lambda: not device.in_flight)
    assert device.dead_rows == 0


# Hand-offs


async def test_hand_off_is_sent_when_its_own_record_comes_and_the_row_behind_it_is_taken_back() -> None:
    small = Held(scripted(SMALL, page_size=1))
    async with pair(small, scripted(LARGE), "every_n", shape="visit", n=2).running() as cluster:
        rid, answer = cluster.submit("demo", [1, 2], max_tokens=8)
        await eventually(lambda: small.in_flight == 2)
        small.allowed = 1
        await eventually(lambda: len(small.launched) == 3)
        request = cluster.workers["small"].requests[rid]
        assert request.fed == 4
        small.allowed = 1
        await eventually(lambda: [m for m in cluster.trace if m.source == 0])
        # The token at output index 1 was dropped; what was queued behind it fed nothing.
        assert request.fed == 3
        assert len(cluster.workers["small"].kv._slots[request.slot].pages) == 3
        small.allowed = 10**6
        await answer.done.wait()
        assert answer.writers == [0, 1] * 4
        await cluster.settled()


@pytest.mark.parametrize("requests", [1, 2])
async def test_hand_offs_of_one_step_leave_together_and_a_lone_one_at_once(requests: int) -> None:
    cluster = pair(scripted(SMALL), scripted(LARGE), "every_n", shape="visit", n=2)
    outbound = cluster.workers["small"].outbound
    blocks: list[int] = []
    """Hand-offs by block of messages that leave together, where there are any."""

    @contextmanager
    def together(most: int) -> Iterator[None]:
        assert most == 0, "models do not take turns"
        begun = len(cluster.trace)
        yield
        if count := len([m for m in cluster.trace[begun:] if m.source == 0]):
            blocks.append(count)

    outbound.connect(outbound._send, together)
    answers = [cluster.submit("demo", [1, n], max_tokens=3)[1] for n in range(requests)]
    async with cluster.running():
        for answer in answers:
            await answer.done.wait()
        await cluster.settled()
    assert len([m for m in cluster.trace if m.source == 0]) == requests
    assert blocks == [2] * (requests - 1)


async def test_first_token_here_after_too_many_hand_offs_is_kept_whatever_the_device_says(tmp_path: Path) -> None:
    path = tmp_path / "pingpong.py"
    path.write_text(
        "import torch\n"
        "from algorithms.base import Algorithm, Definition\n"
        "class Never(Algorithm):\n"
        "    def route(self, step):\n"
        "        return torch.ones_like(step.tokens)\n"
        "ALGORITHM = Definition('pingpong', lambda side: Never)\n"
    )
    devices = [FakeResident(scripted(ids)) for ids in (SMALL, LARGE)]
    async with pair(*devices, str(path), {"max_stall": 3}).running() as cluster:
        answer = await cluster.generate("demo", [1, 2], max_tokens=6)
        assert len(answer.tokens) == 6
        await cluster.settled()
    assert {setup.routable for device in devices for setup in device.setups} == {True, False}


async def test_a_request_that_comes_back_to_its_slot_is_not_described_again() -> None:
    small = FakeResident(scripted(SMALL))
    async with pair(small, FakeResident(scripted(LARGE)), "every_n", shape="visit", n=4).running() as cluster:
        answer = await cluster.generate("demo", [1, 2], max_tokens=40)
        assert answer.handoffs == 19
        await cluster.settled()
    assert len(small.setups) == 1


# Live parameters


async def test_new_parameters_hold_from_the_next_launched_step_on() -> None:
    small = Held(scripted(SMALL))
    async with pair(small, scripted(LARGE), "bernoulli", p=0.0).running() as cluster:
        worker = cluster.workers["small"]
        answers = [cluster.submit("demo", [1, n], max_tokens=30)[1] for n in range(3)]
        single = cluster.submit("small", [9], max_tokens=30)[1]
        await eventually(lambda: small.in_flight == 2)
        small.allowed = 4
        await eventually(lambda: len(small.launched) == 6)
        assert len(small.setups) == 4
        worker.configure("demo", Route(models=["small", "large"], algorithm="bernoulli", params={"p": 1.0}))
        assert len(small.setups) == 4
        small.allowed = 1
        await eventually(lambda: len(small.launched) == 7)
        # One per running slot of the route.
        assert [setup.params for setup in small.setups[4:]] == [(1.0,)] * 3
        small.allowed = 10**6
        for answer in (*answers, single):
            await answer.done.wait()
        for answer in answers:
            assert answer.writers == [0] * 6 + [1] * 24
        assert single.writers == [0] * 30
        await cluster.settled()


# Rows that the host decides


@pytest.mark.parametrize("patience", [0, 5])
async def test_steps_with_rows_of_the_hosts_run_alone(patience: int) -> None:
    """A plain Python algorithm beside device routes and single requests; every answer is what its writers write."""
    dice = random.Random(3)
    models = {name: LookupModel(n, vocab_size=24) for n, name in enumerate(("small", "large"))}
    devices = {name: FakeResident(LookupRunner(m), 2, dice=dice, patience=patience) for name, m in models.items()}
    routes = {
        "python": Route(models=list(models), algorithm=WANDER, params={"keep": [False, True], "restless": 0.4}),
        "tensor": Route(models=list(models), algorithm="bernoulli", params={"p": 0.4}),
    }
    cluster = Cluster(devices, routes, max_batch_tokens=16)
    names = [dice.choice(["python", "tensor", "tensor", "small"]) for _ in range(24)]
    async with cluster.running():
        answers = []
        for number, name in enumerate(names):
            sampling = {"max_tokens": dice.randint(1, 40), "temperature": 1.0, "seed": number}
            answers.append(cluster.submit(name, [number % 24, *PROMPT[: number % 5]], **sampling)[1])
            await turns(dice.randint(0, 40))
        await asyncio.gather(*(answer.done.wait() for answer in answers))
        await cluster.settled()
    for number, (name, answer) in enumerate(zip(names, answers, strict=True)):
        written = [models[model] for model in (routes[name].models if name in routes else [name])]
        sampling = Sampling(seed=number, max_tokens=40)
        ids = [number % 24, *PROMPT[: number % 5]]
        for index, (token, writer) in enumerate(zip(answer.tokens, answer.writers, strict=True)):
            assert token == reference.draw(written[writer](ids), sampling, index, [])
            ids.append(token)
    assert all(device.most_in_flight == 2 for device in devices.values())
    assert {
        writer for name, answer in zip(names, answers, strict=True) if name == "python" for writer in answer.writers
    }


async def test_more_stop_ids_than_a_slot_holds() -> None:
    device = FakeResident(scripted(SMALL), max_stop_ids=3)
    async with alone(device).running() as cluster:
        few = await cluster.generate("small", [1], max_tokens=30, stop_token_ids=(SMALL[9], 3))
        launched = len(device.launched)
        many = await cluster.generate("small", [1], max_tokens=30, stop_token_ids=(SMALL[9], 3, 4, 5))
        assert few.tokens == many.tokens == SMALL[:10]
        assert len(device.launched) == launched
        await cluster.settled()


async def test_a_route_that_the_device_refuses_is_decided_by_the_host() -> None:
    small = FakeResident(scripted(SMALL), refuse=lambda _: True)
    async with pair(small, FakeResident(scripted(LARGE)), "every_n", shape="visit", n=3).running() as cluster:
        answer = await cluster.generate("demo", [1, 2], max_tokens=9)
        assert answer.writers == [0, 0, 1] * 3
        assert not small.launched
        other = await cluster.generate("small", [1, 2], max_tokens=9)
        assert other.tokens == SMALL[:9]
        assert len(small.launched) == 9
        await cluster.settled()


# Failures


class Faulty(Held):
    """Fails at one of its launches, or when it is polled after that."""

    def __init__(self, runner: Any, at: int, *, lost: bool = False) -> None:
        super().__init__(runner)
        self.allowed = 10**6
        self.at, self.lost, self.calls = at, lost, 0

    def launch(self, rows: StepRows) -> int:
        self.calls += 1
        if self.calls == self.at and not self.lost:
            raise RuntimeError("as told")
        return super().launch(rows)

    def poll(self) -> StepRecord | None:
        if self.lost and self.calls >= self.at:
            raise RuntimeError("an illegal memory access was encountered")
        return super().poll()


async def test_failed_launch_ends_its_requests_after_the_steps_before_it() -> None:
    device = Faulty(scripted(SMALL), at=6)
    async with alone(device).running() as cluster:
        answer = await cluster.generate("small", [1, 2], max_tokens=20)
        assert (answer.finish, answer.tokens) == ("error", SMALL[:5])
        fine = await cluster.generate("small", [1, 2], max_tokens=20)
        assert fine.tokens == SMALL[:20]
        await cluster.settled()


async def test_failed_launch_does_not_end_a_request_that_left_in_the_step_before() -> None:
    small = Faulty(scripted(SMALL), at=3)
    small.allowed = 0
    async with pair(small, FakeResident(scripted(LARGE)), "every_n", shape="visit", n=2).running() as cluster:
        answer = cluster.submit("demo", [1, 2], max_tokens=8)[1]
        await eventually(lambda: small.in_flight == 2)
        small.allowed = 1
        # The third launch is that of the dead row behind the hand-off at output index 1.
        await eventually(lambda: small.calls == 3)
        small.allowed = 10**6
        await answer.done.wait()
        assert answer.writers == [0, 1] * 4
        await cluster.settled()


async def test_lost_device_ends_the_worker() -> None:
    device = Faulty(scripted(SMALL), at=5, lost=True)
    cluster = alone(device)
    loop = asyncio.create_task(cluster.workers["small"].run())
    cluster.submit("small", [1, 2], max_tokens=20)
    with pytest.raises(DeviceLostError, match="illegal memory access"):
        await loop


async def test_device_that_does_not_answer_after_a_failed_launch_ends_the_worker() -> None:
    cluster = alone(Faulty(scripted(SMALL), at=5))
    worker = cluster.workers["small"]
    worker._device_answers = lambda: False
    loop = asyncio.create_task(worker.run())
    cluster.submit("small", [1, 2], max_tokens=20)
    with pytest.raises(DeviceLostError, match="after a failed step"):
        await loop


# What the supervisor sees


async def test_progress_names_the_step_that_runs() -> None:
    device = Held(scripted(SMALL))
    async with alone(device).running() as cluster:
        stepper = cluster.workers["small"].stepper
        assert (stepper.steps, stepper.started) == (0, 0.0)
        answer = cluster.submit("small", [1, 2], max_tokens=5)[1]
        await eventually(lambda: device.in_flight == 2)
        began = stepper.started
        await asyncio.sleep(0.01)
        assert stepper.started == began > 0
        assert gauges(cluster.workers["small"])["steps_in_flight"] == 2
        device.allowed = 1
        await eventually(lambda: stepper.steps == 1)
        # The second one runs since the first one was over.
        assert stepper.started > began
        device.allowed = 100
        await answer.done.wait()
        await eventually(lambda: stepper.started == 0.0)
        assert stepper.steps == 5


async def test_waiting_for_a_long_step_takes_no_cpu_and_hears_messages_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """After steps of minutes the loop sleeps through most of the next one, but not through an abort."""
    monkeypatch.setattr(pace, "MOST_NAP", 600.0)
    device = Held(scripted(SMALL), seconds=200.0)
    async with alone(device).running() as cluster:
        worker = cluster.workers["small"]
        rid, _ = cluster.submit("small", [1, 2], max_tokens=50)
        polls = 0
        device.allowed = 3
        await eventually(lambda: len(device.launched) >= 3)
        original = device.poll

        def poll() -> StepRecord | None:
            nonlocal polls
            polls += 1
            return original()

        device.poll = poll  # type: ignore[method-assign]
        await asyncio.sleep(0.05)
        assert polls < 10
        cluster.abort(rid, "small")
        await eventually(lambda: not worker.requests)
        device.allowed = 100


class Interrupted(FakeResident):
    """A batch of the host's is seen only while nothing else is in flight."""

    def step(self, batch: Batch) -> StepOutput:
        assert np.all(batch.tokens >= 0)
        return super().step(batch)


async def test_hosted_requests_that_arrive_in_the_middle(tmp_path: Path) -> None:
    devices = [Interrupted(scripted(ids), 2, dice=random.Random(1), patience=3) for ids in (SMALL, LARGE)]
    cluster = pair(*devices, WANDER, keep=[False, False], restless=0.5)
    async with cluster.running():
        single = [cluster.submit("small", [1, n], max_tokens=50)[1] for n in range(4)]
        await single[0].until(5)
        routed = [cluster.submit("demo", [2, n], max_tokens=20, seed=n)[1] for n in range(3)]
        await asyncio.gather(*(a.done.wait() for a in (*single, *routed)))
        assert all(a.tokens == SMALL[:50] for a in single)
        for answer in routed:
            assert answer.tokens == [(LARGE if w else SMALL)[i] for i, w in enumerate(answer.writers)]
        assert [m for m in cluster.trace if isinstance(m, PeerReq)]
        await cluster.settled()
    # Before and after them steps were in flight again.
    assert devices[0].most_in_flight == 2
