"""The whole daemon with two models on one GPU: pools, MPS, deaths, and a fraction that is too small."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.daemon.instance import Instance, complete, gone, launch, serving
from tests.models.tiny import tiny_qwen3
from trouterd.supervisor.mps import CONTROL

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]

FRACTION = 0.1
NAMES = ("small", "large")
PROMPTS = ("The river", "12 + 7 =", "x", "a longer prompt, of more than one page of tokens, to be fed at once")


def config(folder: Path, device: str, backend: str = "auto", fraction: float = FRACTION) -> str:
    """Two random models of one tokenizer, in float32, so that the greedy ids are those of the reference on a CPU."""
    lines = ["[gpu]", f"memory_fraction = {fraction}"]
    for seed, name in enumerate(NAMES):
        path = tiny_qwen3(folder / name, seed=seed)
        # On a GPU this many contexts do not fit into the fraction: both models get what the memory allows.
        lines += [f"[models.{name}]", f'path = "{path}"', f'device = "{device}"', f'backend = "{backend}"']
        lines += ['dtype = "float32"', "max_requests = 60000" if device != "cpu" else ""]
    lines += ["[routes.demo]", 'models = ["small", "large"]', 'algorithm = "every_n"']
    lines += ['params = { shape = "visit", n = 4 }']
    return "\n".join(lines) + "\n"


async def texts(daemon: Instance) -> list[str]:
    """What the route and both models write."""
    found = []
    async with daemon.session() as session:
        for model in ("demo", *NAMES):
            for prompt in PROMPTS:
                status, body = await complete(session, model, prompt=prompt, max_tokens=40)
                assert status == 200, body
                found.append(body["choices"][0]["text"])
    return found


async def models(daemon: Instance) -> dict[str, dict[str, Any]]:
    """By name."""
    return {model["name"]: model for model in (await daemon.ctl("models"))["models"]}


def mps_variables(pid: int) -> dict[str, str]:
    pairs = (pair.partition("=") for pair in Path(f"/proc/{pid}/environ").read_text().split("\0"))
    return {name: value for name, _, value in pairs if name.startswith("CUDA_MPS_")}


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("backend", ["torch", "flashinfer"])
async def test_two_models_share_a_gpu(tmp_path: Path, backend: str) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "gpu").mkdir()
    async with serving(tmp_path / "cpu", config(tmp_path / "cpu", "cpu")) as daemon:
        wanted = await texts(daemon)
    before, total = torch.cuda.mem_get_info()
    folder = tmp_path / "gpu"
    async with serving(folder, config(folder, "cuda:0", backend)) as daemon:
        held = await models(daemon)
        assert {model["backend"] for model in held.values()} == {backend}
        assert held["small"]["kv_tokens"] == held["large"]["kv_tokens"]
        taken = before - torch.cuda.mem_get_info()[0]
        contexts = 3 << 30
        assert 0.8 * FRACTION * total < taken < FRACTION * total + contexts
        assert await texts(daemon) == wanted
        pids = await daemon.pids()
        if shutil.which(CONTROL) and "CUDA_MPS_PIPE_DIRECTORY" not in os.environ:
            assert await daemon.logged("gpu.mps: started")
            assert mps_variables(pids["small"])["CUDA_MPS_PIPE_DIRECTORY"] == str(folder / "api.mps" / "pipe")
        await daemon.kill("large")
        await daemon.ready()
        assert (await models(daemon))["large"]["kv_tokens"] == held["large"]["kv_tokens"]
        assert await texts(daemon) == wanted
        assert await daemon.stop() == 0
    assert not (folder / "api.mps").exists()


async def test_supervisor_that_was_killed_leaves_nothing_in_the_way(tmp_path: Path) -> None:
    text = config(tmp_path, "cuda:0", "torch")
    async with serving(tmp_path, text) as daemon:
        pids = list((await daemon.pids()).values())
        daemon.process.send_signal(signal.SIGKILL)
        assert await gone(pids, 10)
    async with serving(tmp_path, text) as daemon:
        assert len(await texts(daemon)) == 3 * len(PROMPTS)
        assert await daemon.stop() == 0


async def test_fraction_that_is_too_small(tmp_path: Path) -> None:
    daemon = await launch(tmp_path, config(tmp_path, "cuda:0", "torch", fraction=0.0001))
    assert daemon.process.stderr is not None
    log = (await daemon.process.stderr.read()).decode()
    assert await daemon.process.wait() == 78
    assert "CRITICAL" in log
    assert "gpu.memory_fraction" in log


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
async def test_split_model_beside_one_on_the_same_gpu(tmp_path: Path) -> None:
    for name in ("cpu", "gpu"):
        (tmp_path / name).mkdir()
    async with serving(tmp_path / "cpu", config(tmp_path / "cpu", "cpu")) as daemon:
        wanted = await texts(daemon)
    split = config(tmp_path / "gpu", "cuda:0", "flashinfer").replace(
        "[models.large]", "[models.large]\ntensor_parallel = 2"
    )
    async with serving(tmp_path / "gpu", split) as daemon:
        assert await texts(daemon) == wanted
        worker = (await daemon.pids())["large"]
        (rank,) = children(worker)
        os.kill(rank, signal.SIGKILL)
        assert await daemon.logged(f"large: rank 1 (pid {rank}) was killed by SIGKILL")
        assert await gone([worker], 3)
        assert await daemon.logged("large started", "epoch 2")
        await daemon.ready()
        assert await texts(daemon) == wanted
        assert await daemon.stop() == 0
