"""Which model has the persistent kernel: by one rule in a daemon, in what experiments plan, and in servers of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import experiment_placement
from bench.experiment_case import CaseError
from bench.experiment_kernel import H200, kernel_model
from bench.experiment_scope import Scope
from bench.experiment_settings import Settings
from bench.experiment_setup import Setup
from bench.patterns import ME, PATTERNS, R2R
from bench.std_serving import _alone
from trouterd.config import Config
from trouterd.settings import load
from trouterd.worker.gpu_check import Gpu, Host, may_use_megakernel

PAIR, THREE = ("Qwen3-0.6B", "Qwen3-32B"), ("Qwen3-0.6B", "Qwen3-8B", "Qwen3-32B")
SHARED, APART = ("cuda:0", "cuda:0"), ("cuda:0", "cuda:1")
HOSTS = {
    "h200": Host((H200,) * 3, triton=True),
    "a100": Host((Gpu("A100", (8, 0), 80 * 10**9),) * 3, triton=True),
    "no nvcc": Host((H200,) * 3, triton=True, nvcc=False),
}


@pytest.fixture(autouse=True)
def _no_tokenizers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody reads them, and each takes half a second."""
    monkeypatch.setattr("bench.deployment.write_tokenizer", Path.mkdir)


def setup(*texts: str, devices: tuple[str, ...] = SHARED, sources: tuple[str, ...] = PAIR) -> Setup:
    names = ("small", "middle", "large") if len(sources) == 3 else ("small", "large")
    return Setup(sources, devices, (1,) * len(sources), Settings.read(texts, names))


def routed(made: Setup, folder: Path) -> Config:
    """What a daemon of these models is started with."""
    patterns = (ME,) if len(made.names) == 3 else PATTERNS
    routes = {pattern.route: made.route(pattern, folder, heads=False) for pattern in patterns}
    own = dict.fromkeys(made.names, ("kv_tokens = 4096",))
    file = folder / "trouterd.toml"
    file.write_text(made.deployment(tuple(routes.values()), own=own).configuration(folder))
    return load(file, {})


def owners(config: Config, host: Host) -> list[str]:
    return [name for name in config.models if may_use_megakernel(name, config, host)]


@pytest.mark.parametrize("host", HOSTS.values(), ids=HOSTS)
@pytest.mark.parametrize("texts", [(), ("small.megakernel=off",), ("*.megakernel=off",)])
@pytest.mark.parametrize(
    ("sources", "devices"),
    [
        (PAIR, SHARED),
        (PAIR, APART),
        (("Qwen3-32B", "Qwen3-0.6B"), SHARED),
        (THREE, ("cuda:0",) * 3),
        (THREE, ("cuda:0", "cuda:0", "cuda:1")),
        (THREE, ("cuda:0", "cuda:1", "cuda:2")),
    ],
)
def test_experiments_and_servers_go_by_the_daemons_rule(
    tmp_path: Path, sources: tuple[str, ...], devices: tuple[str, ...], texts: tuple[str, ...], host: Host
) -> None:
    made = setup(*texts, sources=sources, devices=devices)
    config = routed(made, tmp_path)
    there = owners(config, host)
    sharing = [name for name in there if devices.count(devices[made.names.index(name)]) > 1]
    assert [kernel_model(made, host)] == (sharing or [""])
    for name in made.names:
        file = tmp_path / "alone.toml"
        file.write_text(_alone(name, config, host))
        assert owners(load(file, {}), host) == [name] * (name in there)


def test_who_that_is() -> None:
    h200 = HOSTS["h200"]
    assert kernel_model(setup(), h200) == "small"
    assert kernel_model(setup("large.megakernel=on"), h200) == "large"
    assert kernel_model(setup("*.megakernel=off"), h200) == ""
    assert kernel_model(setup(devices=("cpu", "cpu")), h200) == ""
    # A large model that is visited has it only where it is alone, or where it says so.
    assert kernel_model(setup("small.megakernel=off"), h200) == ""
    assert kernel_model(setup("small.megakernel=off", "large.megakernel=on"), h200) == "large"


def test_without_its_gpus_an_h200_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """--list tells of experiments that run elsewhere."""
    small = HOSTS["a100"].gpus[:1]
    for gpus in ((), small):
        monkeypatch.setattr(Host, "this", lambda gpus=gpus: Host(gpus, triton=False, nvcc=False))
        on = ("cuda:1", "cuda:1")
        assert kernel_model(setup(devices=on)) == "small"
        assert kernel_model(setup("small.megakernel=off", devices=on)) == ""
        assert kernel_model(setup("small.megakernel=off", "large.megakernel=on", devices=on)) == "large"
    monkeypatch.setattr(Host, "this", lambda: Host(small, triton=True))
    assert kernel_model(setup()) == "", "it is there"


def test_what_no_daemon_would_serve_is_said() -> None:
    with pytest.raises(CaseError, match=r"^--set models\.large\.megakernel: it needs pages of a multiple of 16 tokens"):
        kernel_model(setup("large.megakernel=on", "large.page_size=8"), HOSTS["h200"])
    split = Setup(PAIR, ("cuda:0", "cuda:0"), (2, 2))
    with pytest.raises(CaseError, match=r"^models\.large\.tensor_parallel: its GPUs 0 to 1 overlap"):
        kernel_model(split, HOSTS["h200"])


def test_no_daemon_is_planned_for_a_kernel_that_nobody_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four of them would be the same."""
    monkeypatch.setattr(Host, "this", lambda: HOSTS["h200"])

    def systems(*texts: str) -> list[str]:
        scope = Scope(setup(*texts), ("low",), (), (R2R,), settle=1.0, learn=1.0)
        return [stage.name for stage in experiment_placement.stages(scope) if stage.name.startswith("kernel at")]

    assert systems() == [f"kernel at {percent} %" for percent in (20, 80, 12, 60)]
    assert systems("small.megakernel=off", "large.megakernel=on") == systems()
    assert systems("small.megakernel=off") == []
