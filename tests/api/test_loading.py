"""What the api reads from disk, and the range checks of `route.params` by the real algorithms."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from models.config import ModelError
from tests.models.tiny import byte_tokenizer, tiny_qwen3
from trouterd.api.loading import ParamChecks, context_lengths
from trouterd.config import Config, Model, Route
from trouterd.tokenizers import load_tokenizers


def test_contexts_and_tokenizers(tmp_path: Path) -> None:
    directory = tiny_qwen3(tmp_path / "qwen", context=96)
    tokenizer = byte_tokenizer(tmp_path / "tok")
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"vocab_size": 260, "eos": 257, "ids": [65], "context_length": 77}))
    config = Config(
        models={
            "own": Model(path=str(directory)),
            "cut": Model(path=str(directory), context_length=50),
            "script": Model(path=str(script), format="script", tokenizer=str(tokenizer)),
        }
    )
    assert context_lengths(config) == {"own": 96, "cut": 50, "script": 77}
    tokenizers = load_tokenizers(config)
    assert tokenizers["own"] is tokenizers["cut"]
    assert tokenizers["script"].encode("A", add_special=False) == [65]


@pytest.mark.parametrize("model_format", ["hf", "script"])
def test_missing_files_are_named(tmp_path: Path, model_format: str) -> None:
    config = Config(models={"m": Model(path=str(tmp_path / "gone"), format=model_format)})  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="gone"):
        context_lengths(config)
    with pytest.raises(ModelError, match="gone"):
        load_tokenizers(config)


async def test_param_checks() -> None:
    config = Config(
        models={"small": Model(path="s"), "large": Model(path="l")},
        routes={"demo": Route(models=["small", "large"], algorithm="entropy", params={"threshold": 0.3})},
    )
    check = ParamChecks(config)
    assert await check("demo", {"threshold": 0.5}) == {"threshold": 0.5}
    with pytest.raises(ValueError, match="thresold"):
        await check("demo", {"thresold": 0.5})
    with pytest.raises(ValueError, match="threshold"):
        await check("demo", {"threshold": -1.0})
    with pytest.raises(ValueError, match="threshold"):
        await check("small", {"threshold": 0.5})


async def test_overrides_are_laid_over_live_values(tmp_path: Path) -> None:
    """What only holds together with the route's other parameters is judged by those in force."""
    rule = tmp_path / "rule.py"
    rule.write_text(
        "import msgspec\n"
        "from algorithms.base import Definition, ReturnAfterOne\n"
        "class Params(msgspec.Struct, frozen=True, forbid_unknown_fields=True):\n"
        "    low: float\n"
        "    high: float\n"
        "def check(params, models):\n"
        "    if params.low > params.high:\n"
        "        raise ValueError('low: above high')\n"
        "ALGORITHM = Definition('rule', lambda side: ReturnAfterOne, Params, check=check)\n"
    )

    def config(high: float) -> Config:
        route = Route(models=["small", "large"], algorithm=str(rule), params={"low": 0.1, "high": high})
        return Config(models={"small": Model(path="s"), "large": Model(path="l")}, routes={"demo": route})

    check = ParamChecks(config(0.5))
    with pytest.raises(ValueError, match="low: above high"):
        await check("demo", {"low": 0.6})
    check.configure(config(0.7))
    assert await check("demo", {"low": 0.6}) == {"low": 0.6}


async def test_file_of_an_algorithm_is_run_once(tmp_path: Path) -> None:
    rule = tmp_path / "rule.py"
    runs = tmp_path / "runs"
    rule.write_text(
        "from pathlib import Path\n"
        "from algorithms.entropy import ALGORITHM as entropy\n"
        f"with Path({str(runs)!r}).open('a') as file:\n"
        "    file.write('run ')\n"
        "ALGORITHM = entropy\n"
    )
    config = Config(
        models={"small": Model(path="s"), "large": Model(path="l")},
        routes={"demo": Route(models=["small", "large"], algorithm=str(rule), params={"threshold": 0.3})},
    )
    check = ParamChecks(config)
    for threshold in (0.5, 0.6):
        assert await check("demo", {"threshold": threshold}) == {"threshold": threshold}
    assert runs.read_text() == "run "
