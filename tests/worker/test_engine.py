"""Opening a model: what the configuration asks for and the host does not have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from algorithms.base import Algorithm, Definition, RouteContext
from algorithms.registry import AlgorithmError
from models.config import ModelError
from models.defer import defer_row
from models.torch_runner import TorchRunner
from models.transformers_runner import TransformersRunner
from tests.models.foreign import tiny_foreign
from tests.models.test_defer import PLAIN, deferring
from tests.models.tiny import tiny_qwen3
from trouterd.config import Batching, Config, Model
from trouterd.demo import SMALL_DIRECTORY
from trouterd.worker.engine import Engine, kernel_share, load_model
from trouterd.worker.route import build_side


def open_engine(model: Model) -> Engine:
    """A model that needs no other's consent."""
    engine = load_model("m", Config(models={"m": model})).engine
    assert isinstance(engine, Engine)
    return engine


def test_more_memory_than_there_is() -> None:
    model = Model(path=str(SMALL_DIRECTORY), kv_tokens=1 << 40)
    with pytest.raises(ModelError, match=r"^models\.m: not enough memory .* KV pool of \d+ MiB; lower kv_tokens"):
        open_engine(model)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this host has CUDA")
@pytest.mark.parametrize("kind", ["hf", "script"])
def test_device_that_is_not_there(kind: str, tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text('{"vocab_size": 4, "eos": 3}')
    path = script if kind == "script" else SMALL_DIRECTORY
    with pytest.raises(ModelError, match=r"^models\.m\.device: cuda:0, but this host"):
        open_engine(Model(path=str(path), format=kind, device="cuda:0"))  # type: ignore[arg-type]


def test_side_whose_own_code_fails() -> None:
    class OddFault(Exception):  # noqa: N818 - of no family that anybody would think of
        pass

    class Faulty(Algorithm):
        def __init__(self, *arguments: object) -> None:
            raise OddFault("two\nlines")

    definition = Definition("odd", lambda side: Faulty)
    context = RouteContext(("a", "b"), 1, 4, 8, torch.device("cpu"))
    with pytest.raises(AlgorithmError, match="'odd': side 1 cannot be built: OddFault: two lines$"):
        build_side(definition, context, definition.params())


def test_a_deferral_row_is_a_fact_of_its_model(tmp_path: Path) -> None:
    model = Model(path=str(deferring(tmp_path / "small")), kv_tokens=600)
    loaded = load_model("m", Config(models={"m": model}))
    row = defer_row(tmp_path / "small")
    assert row is not None
    assert loaded.facts.defer is not None
    assert torch.equal(loaded.facts.defer, row)
    assert loaded.facts.vocab_size == PLAIN
    plain = Model(path=str(tiny_qwen3(tmp_path / "plain")), kv_tokens=600)
    assert load_model("m", Config(models={"m": plain})).facts.defer is None


def test_the_architecture_decides_who_runs_it(tmp_path: Path) -> None:
    foreign = open_engine(Model(path=str(tiny_foreign(tmp_path, "olmo2")), kv_tokens=600))
    assert isinstance(foreign.runner, TransformersRunner)
    assert (foreign.runner.vocab_size, foreign.runner.context_length, foreign.kv.capacity_tokens) == (258, 512, 592)
    assert isinstance(open_engine(Model(path=str(SMALL_DIRECTORY))).runner, TorchRunner)


def test_a_persistent_kernel_leaves_room_on_a_shared_gpu() -> None:
    def share(device: str, percent: int, *, overlap: bool = True) -> float:
        small = Model(path="m", device="cuda:0", megakernel_percent=percent)
        models = {"small": small, "large": Model(path="m", device=device)}
        return kernel_share("small", Config(models=models, batching=Batching(overlap=overlap)))

    assert [share("cuda:0", 0), share("cuda:1", 0), share("cuda:0", 50), share("cuda:1", 50)] == [0.4, 1.0, 0.5, 0.5]
    assert [share("cuda:0", 0, overlap=False), share("cuda:0", 50, overlap=False)] == [1.0, 0.5]
