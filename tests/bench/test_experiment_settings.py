"""Settings of a command line, for all daemons of an experiment."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from bench.experiment_case import CaseError
from bench.experiment_settings import Settings, told
from bench.experiment_setup import Setup
from trouterd.settings import load

NAMES = ("small", "large")


def setup(*texts: str, sources: tuple[str, str] = ("Qwen3-0.6B", "Qwen3-32B"), device: str = "cuda:0") -> Setup:
    return Setup(sources, (device, device), (1, 1), Settings.read(texts, NAMES))


def test_they_reach_the_configuration(tmp_path: Path) -> None:
    texts = [
        "*.depth=1",
        "small.megakernel_percent = 30",
        "models.large.depth=3",
        "batching.overlap=false",
        "gpu.mps=off",
    ]
    made = setup(*texts)
    assert made.settings.values == {
        "models.small.depth": 1,
        "models.large.depth": 3,
        "models.small.megakernel_percent": 30,
        "batching.overlap": False,
        "gpu.mps": "off",
    }
    assert told(made.settings.values) == (
        'small.depth = 1, large.depth = 3, small.megakernel_percent = 30, batching.overlap = false, gpu.mps = "off"'
    )
    same = setup("*.depth=1", "small.page_size=32").settings.values
    assert told(same) == "depth = 1 (small, large), small.page_size = 32"
    made.check()
    assert made.takes_turns
    assert not setup("batching.overlap=true").takes_turns
    tree = tomllib.loads(made.deployment(own={"small": ("depth = 2",)}).configuration(tmp_path))
    assert (tree["models"]["small"]["depth"], tree["models"]["large"]["depth"]) == (2, 3)
    assert tree["models"]["small"]["megakernel_percent"] == 30
    assert tree["batching"] == {"overlap": False}
    assert tree["gpu"] == {"mps": "off"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("small.depth", "--set: expected KEY=VALUE"),
        ("small.megakernel=maybe", "--set models.small.megakernel: expected one of auto, on, off, got 'maybe'"),
        ("small.megakernel_percent=130", r"--set models\.small\.megakernel_percent: expected int <= 100, got 130"),
        ("small.megakernel_part=30", "unknown key 'megakernel_part'; did you mean 'megakernel_percent'"),
        ("middle.depth=1", "unknown key 'middle'.*; models are named small, large"),
        ("batching.overlapping=1", "did you mean 'overlap'"),
        ("batching.mode=eager", "is said by the windows themselves"),
        ("large.thresholds=[1]", "is said by the windows themselves"),
        ("large.path=x", "is said by the options --small, --middle and --large"),
        ("large.device=cpu", "is said by the option --devices"),
        ("routes.r2r.max_stall=3", "--set routes.r2r.max_stall: no entry of 'routes'"),
        ("small=3", "--set models.small.: is a table"),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(CaseError, match=message):
        Settings.read([text], NAMES)


def test_what_does_not_fit_together_is_refused_before_anything_starts() -> None:
    with pytest.raises(CaseError, match=r"--set models\.small\.sm_percent: limits a model on a GPU"):
        setup("small.sm_percent=50", sources=("script:2", "script:8"), device="cpu").check()
    with pytest.raises(CaseError, match=r"--set models\.large\.megakernel: on GPU 0 'small' says 'on' as well"):
        setup("*.megakernel=on").check()
    # Whether models are there is not asked.
    setup("small.depth=1", sources=("/nowhere/small", "/nowhere/large")).check()


@pytest.mark.parametrize("own", [{"small": "megakernel_percent = 12"}, {"large": "sm_percent = 90"}])
def test_divisions_of_a_card_are_valid_configurations(tmp_path: Path, own: dict[str, str]) -> None:
    made = setup("small.megakernel_percent=30")
    (tmp_path / "trouterd.toml").write_text(
        made.deployment(own={name: (line,) for name, line in own.items()}).configuration(tmp_path)
    )
    config = load(tmp_path / "trouterd.toml", {})
    assert config.models["small"].megakernel_percent == (12 if "small" in own else 30)
    assert config.models["large"].sm_percent == (90 if "large" in own else 0)
