"""Loading the configuration: sources, precedence, paths, and errors that name what is wrong."""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec
import pytest

from trouterd.cli import DEMO_CONFIG
from trouterd.config import Config
from trouterd.config_dump import dump
from trouterd.settings import ConfigError, differences, live_keys, load, set_value

LONG = "x" * 300
"""Longer than the name of a file can be."""
BASIC = """
[server]
socket = "api.sock"

[models.small]
path = "weights/small"

[models."big-1.7b"]
path = "weights/big"

[routes.pair]
models = ["small", "big-1.7b"]
algorithm = "entropy"
params = { threshold = 0.3, note = "x" }
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A valid configuration in a folder with its model directories."""
    for name in ("small", "big"):
        (tmp_path / "weights" / name).mkdir(parents=True)
        (tmp_path / "weights" / name / "config.json").write_text("{}")
    path = tmp_path / "trouterd.toml"
    path.write_text(BASIC)
    return path


def problems(file: Path, text: str = "", **environ: str) -> list[str]:
    """What is wrong with the basic file plus some text; the file's name is cut off."""
    file.write_text(BASIC + text)
    with pytest.raises(ConfigError) as caught:
        load(file, environ)
    return [problem.removeprefix(f"{file}: ") for problem in caught.value.problems]


def test_paths_of_the_file_are_relative_to_it(file: Path) -> None:
    config = load(file, {})
    assert config.server.socket == str(file.parent / "api.sock")
    assert config.server.control == str(file.parent / "api.ctl")
    assert config.models["small"].path == str(file.parent / "weights" / "small")
    assert config.routes["pair"].algorithm == "entropy"


def test_a_checkpoint_of_an_algorithm_is_relative_to_the_file(file: Path) -> None:
    route = (
        '[routes.learned]\nmodels = ["small", "big-1.7b"]\nalgorithm = "r2r"\nparams = { checkpoint = "heads/r.pt" }\n'
    )
    file.write_text(BASIC + route)
    assert load(file, {}).routes["learned"].params == {"checkpoint": str(file.parent / "heads" / "r.pt")}


def test_paths_of_flags_and_variables_are_relative_to_the_working_directory(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    config = load(file, {"TROUTERD_SERVER__CONTROL": "c"}, [("server.socket", "s")])
    assert config.server.socket == str(tmp_path / "here" / "s")
    assert config.server.control == str(tmp_path / "here" / "c")


def test_flags_beat_variables_beat_the_file(file: Path) -> None:
    file.write_text(BASIC.replace("[server]", "[server]\ndrain_timeout = 1\nmax_body_bytes = 2000"))
    environ = {"TROUTERD_SERVER__DRAIN_TIMEOUT": "2", "TROUTERD_SERVER__MAX_BODY_BYTES": "3000", "HOME": "/"}
    config = load(file, environ, [("server.max_body_bytes", "4000")])
    assert (config.server.drain_timeout, config.server.max_body_bytes) == (2.0, 4000)


def test_text_values_take_the_types_of_their_keys(file: Path) -> None:
    environ = {
        "TROUTERD_MODELS__BIG_1_7B__THREADS": "2",
        "TROUTERD_MODELS__SMALL__PREFIX_CACHE": "false",
        "TROUTERD_ROUTES__PAIR__PARAMS__THRESHOLD": "0.5",
        "TROUTERD_ROUTES__PAIR__MODELS": '["big-1.7b"]',
        "TROUTERD_SERVER__SOCKET_MODE": "0o660",
        "TROUTERD_SERVER__LISTEN": "127.0.0.1:8000",
    }
    config = load(file, environ, [("models.big-1.7b.device", "cpu")])
    assert config.models["big-1.7b"].threads == 2
    assert config.models["small"].prefix_cache is False
    assert config.routes["pair"].params == {"threshold": 0.5, "note": "x"}
    assert config.routes["pair"].models == ["big-1.7b"]
    assert config.server.socket_mode == 0o660


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[serer]\n", "serer: unknown key; did you mean 'server'?"),
        ("[rings]\ncapcity = 1", "rings.capcity: unknown key; did you mean 'capacity'?"),
        ("[models.x]\npath = 'weights/small'\nthredas = 1", "models.x.thredas: unknown key; did you mean 'threads'?"),
        ("[models.x]\npath = 'weights/small'\nthreads = 0", "models.x.threads: expected int >= 1, got 0"),
        ("[models.x]\npath = 'weights/small'\nthreads = '2'", "models.x.threads: expected int, got '2'"),
        (
            "[models.x]\npath = 'weights/small'\ndtype = 'bfloat'",
            "models.x.dtype: expected one of auto, float32, bfloat16, got 'bfloat'; did you mean 'bfloat16'?",
        ),
        ("[models]\nx = 1", "models.x: expected a table, got 1"),
        ("[routes.x]\nmodels = ['small']\nmax_stall = 1", "routes.x.max_stall: expected int >= 2, got 1"),
        ("[routes.x]\nmodels = []", "routes.x.models: expected array of length >= 1, got []"),
        ("[routes.x]\nmodels = ['smal']", "routes.x.models: unknown model 'smal'; did you mean 'small'?"),
        ("[routes.x]\nmodels = ['small', 'small']", "routes.x.models: a model is named twice: small, small"),
        ("[routes.small]\nmodels = ['small']", "routes.small: the name is also a model's"),
        ("[routes.x]\nmodels = ['small']\nalgorithm = './rule.py'", "routes.x.algorithm: no file {folder}/rule.py"),
        ("[models.api]\npath = 'weights/small'", "models.api: the name is reserved"),
        ("[models.'a b']\npath = 'weights/small'", "models.a b: a name is letters"),
        ("[models.x]\npath = 'nowhere'", "models.x.path: no model directory {folder}/nowhere"),
        ("[models.x]\npath = 'weights'", "models.x.path: no config.json in {folder}/weights"),
        ("[models.x]\npath = 'nowhere'\nformat = 'script'", "models.x.path: no script file {folder}/nowhere"),
        ("[models.x]\npath = 'builtin:medium'", "models.x.path: no such built-in model: builtin:medium"),
        ("[models.x]\ndtype = 'float32'", "models.x.path: required"),
        ("[models.x]\npath = 'weights/small'\ntokenizer = 't'", "models.x.tokenizer: no directory {folder}/t"),
        ("[models.x]\npath = 'weights/small'\ndevice = 'gpu'", "models.x.device: expected 'cpu' or a CUDA device"),
        ("[models.x]\npath = 'weights/small'\ndevice = 'cuda:128'", "models.x.device: expected 'cpu' or a CUDA device"),
        ("[models.x]\npath = 'weights/small'\ndevice = 'cuda:01'", "models.x.device: expected 'cpu' or a CUDA device"),
        (f"[models.x]\npath = '{LONG}'", f"models.x.path: no model directory {{folder}}/{LONG} (File name too long)"),
        (f"[models.x]\npath = 'weights/small'\ntokenizer = '{LONG}'", "models.x.tokenizer: no directory "),
        (f"[routes.x]\nmodels = ['small']\nalgorithm = './{LONG}'", "routes.x.algorithm: no file "),
        ("[rings]\ncapacity = 100000", "rings.capacity: expected a power of two, got 100000"),
        ("[rings]\ncapacity = 1099511627776", "rings.capacity: expected int <= 1073741824"),
        ("[supervision]\nheartbeat_interval = inf", "supervision.heartbeat_interval: expected float <= 60"),
        ("[models.x]\npath = 'weights/small'\nmax_requests = 1000000000", "models.x.max_requests: expected int <= "),
        (f"[rings]\nspill_bytes = {10**30}", "rings.spill_bytes: a whole number of more than 64 bits"),
        (f"[routes.x]\nmodels = ['small']\nparams = {{ n = {10**30} }}", "routes.x.params: a whole number of more"),
        ("[models.\"a\\nb\"]\npath = 'weights/small'", r"models.'a\nb': a name is letters"),
        ("[routes.'']\nmodels = ['small']", "routes.'': a name is letters"),
    ],
)
def test_mistakes_are_named(file: Path, text: str, problem: str) -> None:
    found = problems(file, "\n" + text)
    assert len(found) == 1
    assert found[0].startswith(problem.format(folder=file.parent))


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ("tensor_parallel = 3\ndevice = 'cuda'", "models.x.tensor_parallel: expected a power of two, got 3"),
        ("tensor_parallel = 2", "models.x.tensor_parallel: splits a model over GPUs, but the device is 'cpu'"),
        ("tensor_parallel = 2\ndevice = 'cuda'\nbackend = 'torch'", "models.x.tensor_parallel: the 'torch' backend"),
        ("backend = 'flashinfer'", "models.x.backend: 'flashinfer' needs a CUDA device, but the device is 'cpu'"),
        ("backend = 'flash'", "models.x.backend: expected one of auto, torch, flashinfer, got 'flash'"),
        ("sm_percent = 50", "models.x.sm_percent: limits a model on a GPU, but the device is 'cpu'"),
        ("sm_percent = 50\ndevice = 'cuda:1'", "models.x.sm_percent: works through MPS, which only models that share"),
        ("megakernel = 'on'", "models.x.megakernel: runs on a GPU, but the device is 'cpu'"),
        ("megakernel = 'yes'\ndevice = 'cuda'", "models.x.megakernel: expected one of auto, on, off, got 'yes'"),
        ("depth = 5", "models.x.depth: expected int <= 4, got 5"),
    ],
)
def test_mistakes_about_gpus_are_named(file: Path, keys: str, problem: str) -> None:
    (found,) = problems(file, f"\n[models.x]\npath = 'weights/small'\n{keys}")
    assert found.startswith(problem)


def test_mistakes_about_shared_gpus_are_named(file: Path) -> None:
    split = "path = 'weights/small'\ntensor_parallel = 2\ndevice = 'cuda:{}'\n"
    text = f"\n[models.x]\n{split.format(0)}[models.y]\n{split.format(1)}[models.z]\n{split.format(2)}"
    assert problems(file, text) == [
        f"models.{name}.tensor_parallel: its GPUs {gpus} overlap with those of {others}, which is split too;"
        " give split models GPUs of their own"
        for name, gpus, others in (("y", "1 to 2", "'x', 0 to 1"), ("z", "2 to 3", "'y', 1 to 2"))
    ]
    shared = "path = 'weights/small'\ndevice = 'cuda'\nsm_percent = 20\n"
    found = problems(file, f"\n[gpu]\nmps = 'off'\n[models.x]\n{shared}[models.y]\n{shared}")
    assert found == [f"models.{name}.sm_percent: works through MPS, but gpu.mps is 'off'" for name in "xy"]
    kernel = "path = 'weights/small'\ndevice = 'cuda'\nmegakernel = 'on'\n"
    both = (
        "models.y.megakernel: on GPU 0 'x' says 'on' as well; set one of them to 'off', divide the GPU (megakernel_percent of all"
        " that say 'on', 100 in all at most), or let them take turns (batching.overlap = false)"
    )
    for x, y in ((0, 0), (0, 20), (21, 80)):
        parts = [f"{kernel}megakernel_percent = {percent}\n" for percent in (x, y)]
        assert problems(file, f"\n[models.x]\n{parts[0]}[models.y]\n{parts[1]}") == [both]
    file.write_text(
        f"{BASIC}\n[models.x]\n{kernel}megakernel_percent = 20\n[models.y]\n{kernel}megakernel_percent = 80\n"
    )
    load(file, {})
    file.write_text(f"{BASIC}\n[batching]\noverlap = false\n[models.x]\n{kernel}[models.y]\n{kernel}")
    load(file, {})
    apart = kernel.replace("'cuda'", "'cuda:1'")
    file.write_text(f"{BASIC}\n[models.x]\n{kernel}[models.y]\n{apart}")
    load(file, {})
    assert problems(file, "[gpu]\nmemory_fraction = 1.5")[0].startswith("gpu.memory_fraction: expected float <= 1")


def test_gpus_of_models(file: Path) -> None:
    file.write_text(BASIC + "[models.x]\npath = 'weights/small'\ndevice = 'cuda:1'\ntensor_parallel = 2\n")
    small = [("models.small.device", "cuda:2"), ("models.small.sm_percent", "30")]
    config = load(file, {"TROUTERD_GPU__MEMORY_FRACTION": "0.5"}, small)
    assert config.gpu.memory_fraction == 0.5
    assert [list(model.gpus) for model in config.models.values()] == [[2], [], [1, 2]]
    assert [model.element_type for model in config.models.values()] == ["bfloat16", "float32", "bfloat16"]
    assert config.shared_gpus == [2]
    assert config.sharing(2) == ["small", "x"]


def test_keys_given_as_text_below_something_that_is_no_table(tmp_path: Path) -> None:
    file = tmp_path / "trouterd.toml"
    file.write_text("models = 3")
    environ, flags = {"TROUTERD_MODELS__SMALL__THREADS": "2"}, [("models.small.dtype", "bfloat16")]
    with pytest.raises(ConfigError) as caught:
        load(file, environ, flags)
    assert caught.value.problems == [
        f"{file}: models: expected one table per name, got 3",
        "environment: models.small.threads: no entry of 'models' in 'small.threads'",
        "flag: models.small.dtype: no entry of 'models' in 'small.dtype'",
    ]


def test_every_path_may_begin_with_the_home_folder(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(file.parent))
    route = '[routes.own]\nmodels = ["small", "big-1.7b"]\nalgorithm = "~/a.py"\nparams = { checkpoint = "~/r.pt" }\n'
    file.write_text(BASIC.replace("api.sock", "~/api.sock") + route)
    (file.parent / "a.py").touch()
    config = load(file, {}, [("models.small.path", "~/weights/small"), ("batching.state", "~/state.json")])
    assert config.routes["own"].params == {"checkpoint": str(file.parent / "r.pt")}
    assert config.routes["own"].algorithm == str(file.parent / "a.py")
    assert config.server.socket == str(file.parent / "api.sock")
    assert config.models["small"].path == str(file.parent / "weights" / "small")
    assert config.batching.state == str(file.parent / "state.json")


def test_home_folder_of_nobody_in_a_parameter(file: Path) -> None:
    route = (
        '[routes.own]\nmodels = ["small", "big-1.7b"]\nalgorithm = "r2r"\nparams = { checkpoint = "~nobody-here/r" }\n'
    )
    file.write_text(BASIC + route)
    with pytest.raises(ConfigError, match=r"routes\.own\.params\.checkpoint: no such home folder: ~nobody-here/r"):
        load(file, {})


def test_home_folder_of_nobody(file: Path) -> None:
    file.write_text(BASIC.replace("api.sock", "~nobody-here/api.sock"))
    with pytest.raises(ConfigError, match=r"server\.socket: no such home folder: ~nobody-here/api\.sock"):
        load(file, {})


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("listen", "'localhost'", "server.listen: expected HOST:PORT such as 127.0.0.1:8000, got 'localhost'"),
        ("listen", "'h:99999'", "server.listen: expected HOST:PORT"),
        ("socket_group", "'nobody-here'", "server.socket_group: no group 'nobody-here' on this host"),
        ("api_key_file", "'keys'", "server.api_key_file: no file {folder}/keys"),
        ("control", "'api.sock'", "server.control: the same as server.socket: {folder}/api.sock"),
        ("control", "'no/where'", "server.control: no folder {folder}/no"),
        ("control", f"'{'x' * 120}'", "server.control: path of "),
        ("api_key_file", f"'{LONG}'", "server.api_key_file: no file "),
        ("control", '"a\\u0000b"', "server.control: a path holds no zero bytes: "),
    ],
)
def test_server_mistakes_are_named(file: Path, key: str, value: str, problem: str) -> None:
    file.write_text(BASIC.replace("[server]", f"[server]\n{key} = {value}"))
    with pytest.raises(ConfigError) as caught:
        load(file, {})
    assert [line.startswith(f"{file}: " + problem.format(folder=file.parent)) for line in caught.value.problems] == [
        True
    ]


def test_all_mistakes_come_at_once(file: Path) -> None:
    assert len(problems(file, "[rings]\ncapcity = 1\nspin_us = -1\n[serer]\n")) == 3


def test_mistakes_outside_the_file_name_their_source(file: Path) -> None:
    assert problems(file, TROUTERD_SERVER__SOCKTE="x") == [
        "environment: server.sockte: unknown key 'sockte'; did you mean 'socket'?"
    ]
    assert problems(file, TROUTERD_SERVER_SOCKET="x")[0].startswith("TROUTERD_SERVER_SOCKET: write sections with two")
    assert problems(file, TROUTERD_RINGS__SPIN_US="2000") == [
        "environment: rings.spin_us: expected int <= 1000, got 2000"
    ]
    with pytest.raises(ConfigError, match="^flag: server.listen: expected HOST:PORT"):
        load(file, {"TROUTERD_SERVER__LISTEN": "127.0.0.1:1"}, [("server.listen", "80")])
    with pytest.raises(ConfigError, match="flag: models.smal.threads: no entry of 'models'.*did you mean 'small'"):
        load(file, {}, [("models.smal.threads", "1")])


def test_variables_and_flags_over_a_file_of_the_wrong_shape(tmp_path: Path) -> None:
    file = tmp_path / "f.toml"
    file.write_text("models = 5\n")
    with pytest.raises(ConfigError) as caught:
        load(file, {"TROUTERD_MODELS__SMALL__THREADS": "4"})
    assert caught.value.problems == [
        f"{file}: models: expected one table per name, got 5",
        "environment: models.small.threads: no entry of 'models' in 'small.threads'",
    ]
    with pytest.raises(ConfigError, match="expected one table per name"):
        load(file, {}, [("models.small.threads", "4")])


def test_flag_that_is_no_text(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"flag: server\.socket: not UTF-8"):
        load(file, {}, [("server.socket", "/tmp/\udcff")])  # noqa: S108


def test_file_that_is_missing_or_no_toml(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the configuration: No such file"):
        load(tmp_path / "none.toml", {})
    (tmp_path / "bad.toml").write_text("[server\n")
    with pytest.raises(ConfigError, match="bad.toml: not TOML: .*line 1"):
        load(tmp_path / "bad.toml", {})
    (tmp_path / "bad.toml").write_text("a = " + "[" * 100_000)
    with pytest.raises(ConfigError, match="bad.toml: not TOML: "):
        load(tmp_path / "bad.toml", {})


def test_no_models_is_a_mistake() -> None:
    with pytest.raises(ConfigError, match="models: no model is configured"):
        load(None, {})


def test_builtin_pair_is_in_the_package(tmp_path: Path) -> None:
    path = tmp_path / "t.toml"
    path.write_text(DEMO_CONFIG)
    config = load(path, {})
    assert [Path(model.path, "model.safetensors").is_file() for model in config.models.values()] == [True, True]


def test_example_file_serves_what_the_demo_serves() -> None:
    example = tomllib.loads((Path(__file__).parents[2] / "trouterd.toml").read_text())
    demo = tomllib.loads(DEMO_CONFIG)
    assert example["models"] == demo["models"]
    assert example["routes"] == demo["routes"]


def test_dump_loads_to_the_same_and_documents_every_key(file: Path, tmp_path: Path) -> None:
    file.write_text(
        BASIC + '"odd key" = { nested = [1, "two", 3.5, true] }\ntext = "quote \\" tab \\t del \\u007f é"\n'
    )
    # Keys of a free table: the last table of BASIC is the route, so they must go into params.
    file.write_text(
        BASIC.replace('note = "x"', '"odd key" = { nested = [1, "two", 3.5, true] }, text = "q \\" \\t \\u007f é"')
    )
    config = load(file, {}, [("server.socket_mode", "0o660")])
    text = dump(config)
    again = tmp_path / "again.toml"
    again.write_text(text)
    assert load(again, {}) == config
    assert "socket_mode = 0o660" in text
    assert "# default: 30.0; >= 0; live\ndrain_timeout = 30.0" in text
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if " = " in line and not line.startswith("#"):
            assert lines[number - 2].startswith("# "), line
            assert lines[number - 1].endswith(("; live", "; fixed at start")), line


def test_live_keys() -> None:
    assert {"server.drain_timeout", "routes.*.params.*", "models.*.max_batch_tokens"} <= set(live_keys())
    assert "server.socket" not in live_keys()


def test_set_value_builds_a_new_configuration(file: Path) -> None:
    config = load(file, {})
    changed, old, new = set_value(config, "routes.pair.params.threshold", "0.4")
    assert (old, new) == (0.3, 0.4)
    assert config.routes["pair"].params["threshold"] == 0.3
    assert changed.routes["pair"].params == {"threshold": 0.4, "note": "x"}
    assert differences(config, changed) == [("routes.pair.params.threshold", 0.4)]
    added, old, _ = set_value(config, "routes.pair.params.beta", 2)
    assert old is None
    assert added.routes["pair"].params["beta"] == 2
    several, _, _ = set_value(config, "routes.pair.params.weights", "[1, 0.5]")
    assert several.routes["pair"].params["weights"] == [1, 0.5]


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("server.socket", "x", "not live"),
        ("server", "x", "is a table; name one of its keys"),
        ("server.log_level", "loud", "expected one of debug, info, warning, error"),
        ("server.drain_timeout", True, "expected float"),
        ("routes.pair.params", "{}", "name one entry"),
        ("routes.pair.params.note", "text", "only numbers are live"),
        ("routes.pair.params.threshold", "true", "only numbers are live"),
        ("routes.pair.params.threshold", '[1, "x"]', "only numbers are live"),
        ("routes.par.max_stall", "3", "did you mean 'pair'"),
        ("routes.pair.max_stall.x", "3", "is a value, not a table"),
        ("models.big-1.7b.max_batch_tokens", "3", "expected int >= 16"),
        ("models.big-1.7b.max_batch_tokens", "9" * 30, "more than 64 bits"),
        ("routes.pair.params.threshold", "9" * 30, "more than 64 bits"),
    ],
)
def test_set_value_refuses(file: Path, name: str, value: object, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        set_value(load(file, {}), name, value)


def test_every_key_is_documented() -> None:
    assert "# \n" not in dump(Config())
    assert msgspec.to_builtins(Config())  # the defaults themselves are valid


@pytest.mark.parametrize(
    ("small", "big", "words"),
    [
        ("[1, 3]", "[]", "models.small.thresholds: 3 for 2 active requests, of which no more can be ready"),
        ("[2]", "[]", "models.small.thresholds: 2 for 1 active requests, of which no more can be ready"),
        (
            "[1, 2, 2]",
            "[1, 1, 3]",
            "with 3 active requests of route 'pair' all models could wait at once (small 2, big-1.7b 3)",
        ),
        ("[1, 2]", "[1, 1, 3]", "with 3 active requests"),
        (f"{[1] * 300 + [257]}", "[]", "257 ready requests are more than models.small.max_requests, 256"),
    ],
)
def test_lists_of_delayed_batching_that_could_deadlock(file: Path, small: str, big: str, words: str) -> None:
    values = {"models.small.thresholds": small, "models.big-1.7b.thresholds": big}
    with pytest.raises(ConfigError) as caught:
        load(file, {}, list(values.items()))
    assert words in str(caught.value)


def test_a_long_value_is_cut_in_messages(file: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        set_value(load(file, {}), "models.small.thresholds", [1] * 5000)
    assert "thresholds: expected array of length <= 4096, got [1, 1, 1" in str(caught.value)
    assert len(str(caught.value)) < 250


def test_lists_of_delayed_batching(file: Path) -> None:
    config = load(file, {}, [("models.small.thresholds", "[1, 1, 2]"), ("models.big-1.7b.thresholds", "[1, 2, 2]")])
    assert config.models["big-1.7b"].thresholds == [1, 2, 2]
    assert config.batching.mode == "auto"
    assert {"batching.mode", "batching.relax", "models.*.thresholds", "models.*.linger_ms"} <= set(live_keys())
    for value in ("[0]", "[1.5]", "3", '["a"]'):
        with pytest.raises(ConfigError):
            set_value(config, "models.small.thresholds", value)
