"""The command: systems side by side, tables, plots and JSON."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import msgspec
import pytest
from PIL import Image

from bench.daemon import Served, running
from bench.experiment_case import Case
from bench.experiment_windows import measuring
from bench.percentiles import Percentiles
from bench.progress import Progress
from bench.repeats import merged, spread
from bench.target import Target
from bench.throughput import main
from bench.throughput_report import large_only, number, ratio, report
from bench.window import NONCE, Repeat, Window
from tests.bench.fake_server import FakeServer
from tests.daemon.instance import scripts

WINDOW = ["--seconds", "0.4", "--settle", "0.1", "--workload", "10/40"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("t")
    chance = 'models = ["small", "large"]\nalgorithm = "bernoulli"\nparams = { p = 0.3 }'
    with running(folder, scripts(folder, delay_ms=2.0, **{"routes.chance": chance})) as daemon:
        yield daemon


@contextmanager
def threaded(server: FakeServer, folder: Path) -> Iterator[str]:
    """Serve beside the command, which has an event loop of its own."""
    ready: list[str] = []
    started, ended = threading.Event(), threading.Event()

    async def serve() -> None:
        async with server.served(folder, tcp=True) as url:
            ready.append(url)
            started.set()
            await asyncio.to_thread(ended.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        started.wait()
        yield ready[0]
    finally:
        ended.set()
        thread.join()


def test_side_by_side(served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    ours = [
        "--target",
        f"ours=unix:{served.socket}",
        "--control",
        str(served.control),
        "--model",
        "chance",
        "--model",
        "large",
    ]
    with threaded(FakeServer(), tmp_path) as url:
        arguments = [
            *ours,
            "--url",
            url,
            "--gpus",
            "2",
            "--streams",
            "1,2",
            *WINDOW,
            "--cut",
            "30",
            "--seed",
            "5",
            "--output",
            str(out),
        ]
        assert main(arguments) == 0
    captured = capsys.readouterr()
    content = json.loads((out / "throughput.json").read_text())
    foreign = f"{url.removeprefix('http://')} fake"
    names = [(window["system"], window["streams"]) for window in content["windows"]]
    assert names == [(system, count) for count in (1, 2) for system in ("ours chance", "ours large", foreign)]
    assert content["command"].startswith("python -m bench.throughput --target ours=")
    assert content["failures"] == []
    assert content["settings"] == {"seconds": 0.4, "settle": 0.1, "cut": 30, "seed": 5, "repeats": 1, "nonce": NONCE}
    assert {"hardware", "versions", "commit"} <= content.keys()
    text = (out / "throughput.md").read_text()
    assert text.strip() == captured.out.strip()
    assert "## 10/40, answers cut to 30" in text
    assert "| x ours large |" in text
    rows = [line for line in text.splitlines() if line.startswith("| ours large | 2 |")]
    assert len(rows) == 2
    assert rows[0].split(" | ")[3] == "1.00"
    assert "large 100.0" in rows[1]
    assert "[6/6] " in captured.err
    assert "\r" not in captured.err
    with Image.open(out / "throughput-1.png") as picture:
        assert picture.width > 1000
    assert (out / "throughput-1.svg").exists()


def test_all_that_a_server_lists(served: Served, tmp_path: Path) -> None:
    target = ["--target", f"t=unix:{served.socket}", "--streams", "1", *WINDOW, "--no-plots", "--output", str(tmp_path)]
    assert main(target) == 0
    windows = json.loads((tmp_path / "throughput.json").read_text())["windows"]
    assert {window["system"] for window in windows} == {
        f"t {name}" for name in ("small", "large", "demo", "strict", "chance")
    }
    assert {window["extra"].get("large") for window in windows} == {None, "large"}
    assert not list(tmp_path.glob("*.png"))


def test_as_many_streams_as_have_room(served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pool = 65_536
    assert f'trouterd_kv_tokens{{model="small"}} {float(pool)}' in served.metrics()
    most = pool // (3000 + 500 + 32)
    target = ["--target", f"t=unix:{served.socket}", "--model", "small", "--no-plots", "--output", str(tmp_path)]
    window = ["--seconds", "0.2", "--settle", "0.1", "--workload"]
    assert main([*target, *window, "3000/1000", "--streams", f"{most + 1},{most + 2}"]) == 0
    said = f"N = {most + 2}: no room for so many, and what there is room for has been measured"
    assert said in capsys.readouterr().err
    windows = json.loads((tmp_path / "throughput.json").read_text())["windows"]
    assert [window["streams"] for window in windows] == [most]
    assert main([*target, *window, "4/200000", "--streams", "1"]) == 1
    assert "N = 1: the smallest KV pool has 65,536 tokens, which is room for 0 requests" in capsys.readouterr().err


def test_a_system_that_fails_leaves_the_others(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with threaded(FakeServer(fault="status", sound=3), tmp_path) as url:
        arguments = ["--target", f"broken={url}", "--target", f"t=unix:{served.socket}", "--model", "small"]
        arguments += ["--streams", "1,2", *WINDOW, "--no-plots", "--output", str(tmp_path)]
        assert main(arguments) == 1
    content = json.loads((tmp_path / "throughput.json").read_text())
    assert [window["system"] for window in content["windows"]] == ["t small", "t small"]
    ((system, reason),) = content["failures"]
    assert system == "broken fake"
    assert reason.startswith(f"{url}: POST /v1/completions: HTTP 503: the model is gone")
    assert "left out" in capsys.readouterr().err
    assert "broken fake failed: " in (tmp_path / "throughput.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name a system with --target"),
        (["--model", "a"], "comes after the --target"),
        (["--target", "http://x"], "expected NAME=URL"),
        (["--url", "ftp://x"], "ftp://x: expected http"),
        (["--url", "unix:x", "--workload", "lwo"], "neither low, high, agent"),
        (["--url", "unix:x", "--streams", "0"], "expected a whole number from 1 on"),
        (["--url", "unix:x", "--seconds", "-1"], "above 0"),
        (["--url", "unix:x", "--repeats", "0"], "expected a whole number from 1 on"),
    ],
)
def test_wrong_usage(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--output", "x", *arguments])
    assert message in capsys.readouterr().err


def test_servers_that_cannot_be_asked(served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each is named, and what can be asked is measured."""
    none = f"unix:{tmp_path}/none"
    arguments = ["--target", f"gone={none}", "--target", f"deaf=unix:{served.socket}", "--control", f"{tmp_path}/none"]
    arguments += ["--target", f"t=unix:{served.socket}", "--model", "huge", "--model", "small"]
    assert main([*arguments, "--streams", "1", *WINDOW, "--no-plots", "--output", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert f"bench.throughput: gone: {none}: cannot connect" in said
    assert f"bench.throughput: deaf: no daemon answers at {tmp_path}/none" in said
    assert f"bench.throughput: t huge: unix:{served.socket}: serves no such model; it has demo, " in said
    content = json.loads((tmp_path / "throughput.json").read_text())
    assert [window["system"] for window in content["windows"]] == ["t small"]
    assert [system for system, _ in content["failures"]] == ["gone", "deaf", "t huge"]
    report = (tmp_path / "throughput.md").read_text()
    assert f"gone failed: {none}: cannot connect" in report


def test_when_nothing_can_be_asked(tmp_path: Path) -> None:
    none = f"unix:{tmp_path}/none"
    assert main(["--url", none, "--no-plots", "--output", str(tmp_path / "out")]) == 1
    content = json.loads((tmp_path / "out" / "throughput.json").read_text())
    assert content["windows"] == []
    assert [system for system, _ in content["failures"]] == [f"{tmp_path}/none"]


@pytest.mark.parametrize("first", ["--experiment", "--report=DIR"])
def test_experiments_are_reached(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def experiments(arguments: list[str]) -> int:
        asked.append(arguments)
        return 7

    monkeypatch.setattr("bench.experiments.main", experiments)
    assert main([first, "a", "--output", "x"]) == 7
    assert asked == [[first, "a", "--output", "x"]]


def window(
    system: str, streams: int, rate: float, *, large: str = "", models: dict[str, float] | None = None
) -> Window:
    times = Percentiles(1234.5, 1.25, 10, None, 40)
    return Window(
        system=system,
        workload="low",
        streams=streams,
        seconds=20.0,
        tokens_per_second=rate,
        ttft_ms=times,
        gap_ms=times,
        request_ms=None,
        requests=0,
        tokens_per_model=models or {},
        handoffs_per_100=None,
        batch={},
        step_ms={},
        busy={},
        gpu_seconds_per_1000=1000 / rate,
        large_forwards_per_1000=None,
        ideal=2 * rate,
        overlap={},
        handed={"tiny": 1 / 3, "big": 1.0} if models else {},
        wait_ms={"tiny": Percentiles(0.5, 0.25, 0.75, None, 50)} if models else {},
        extra={"gpus": 1, "ttft_of": "start", "request_estimate_ms": 4250.0} | ({"large": large} if large else {}),
    )


def test_report() -> None:
    windows = [
        window("routed", 4, 300.0, large="big", models={"tiny": 200.0, "big": 100.0}),
        window("alone", 4, 120.0, large="big", models={"big": 120.0}),
        window("other", 8, 50.0),
    ]
    assert large_only(windows) == "alone"
    assert large_only(windows[:1]) == ""
    assert [ratio(one, windows, "alone") for one in windows] == [2.5, 1.0, None]
    text = report(windows, "# Head")
    assert text.startswith("# Head\n")
    assert "| routed | 4 | 300 | 2.50 | 75 | 1,234; 1.25, 10, -* (40) | 1,234; 1.25, 10, - | - | 0 | 4.2 |" in text
    assert (
        "| routed | 4 | tiny 66.7, big 33.3 | tiny 33.3, big 100.0 | - | - | - | - | - | - | tiny 0.50 / - | - | 50% | 3.33 | - |"
        in text
    )
    assert "| other | 8 | 50 | - | 6.25 |" in text
    assert "GPU-s per 1,000" in text
    elsewhere = report(windows, "# Head", "device")
    assert "device-s per 1,000" in elsewhere
    assert "GPU-s per 1,000" not in elsewhere


def test_repeats_are_one_window_with_a_spread() -> None:
    first, second = (window("routed", 4, rate, models={"big": rate}) for rate in (300.0, 200.0))
    first = replace(first, requests=3, handed={"big": 0.9}, extra={"gpus": 1, "held_ms": 2.0, "ttft_of": "start"})
    second = replace(second, requests=4, handed={"big": 0.7}, seed=1, gap_ms=None)
    both = merged([first, second])
    assert (both.system, both.workload, both.streams, both.seed) == ("routed", "low", 4, 0)
    times = first.ttft_ms
    assert times is not None
    assert (both.tokens_per_second, both.tokens_per_model, both.requests) == (250.0, {"big": 250.0}, 7)
    assert both.handed["big"] == pytest.approx(0.8)
    assert both.gap_ms == first.gap_ms
    assert both.request_ms is None
    assert both.extra == {"gpus": 1, "held_ms": 2.0, "ttft_of": "start", "request_estimate_ms": 4250.0}
    assert both.ttft_ms == replace(times, count=80)
    during = replace(first, ttft_ms=replace(times, mean=1.0), extra={"gpus": 1})
    assert merged([first, during, second]).ttft_ms == during.ttft_ms
    assert "ttft_of" not in merged([first, during]).extra
    assert both.repeats == [Repeat(0, 300.0, {"big": 0.9}), Repeat(1, 200.0, {"big": 0.7})]
    assert spread(both) == (200.0, 300.0)
    assert "| routed | 4 | 250 (200 to 300) |" in report([both], "")
    assert merged([first]) is first
    assert spread(first) is None
    # As a file has it.
    assert msgspec.convert(json.loads(json.dumps(asdict(both))), Window) == both


def test_windows_of_an_experiment_repeat_with_seeds_of_their_own(tmp_path: Path) -> None:
    case = Case(system="x", workload="10/40", subject="fake", streams=1, settle=0.01, repeats=2)
    with threaded(FakeServer(), tmp_path) as url:
        found = measuring(0.05, 7, Progress(1, io.StringIO()))(Target("x", url, "fake", 1), case)
    assert [repeat["seed"] for repeat in found["repeats"]] == [7, 8]
    assert found["tokens_per_second"] == pytest.approx(sum(r["tokens_per_second"] for r in found["repeats"]) / 2)


def test_numbers() -> None:
    assert [number(value) for value in (12345.6, 99.94, 1.2345, 0.01234)] == ["12,346", "99.9", "1.23", "0.0123"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress() -> None:
    plain, terminal = io.StringIO(), Terminal()
    for stream in (plain, terminal):
        progress = Progress(4, stream)
        progress.show("one, which is long", 0.5)
        progress.done("one: 5")
        progress.show("two", 1.0)
    assert plain.getvalue() == "[1/4] one: 5\n"
    bars = terminal.getvalue().split("\r")
    assert bars[1].startswith("[####..........................] 1/4 one, which is long: 50%")
    assert bars[2].endswith("\n")
    assert len(bars[2].rstrip("\n")) >= len(bars[1].rstrip())
    assert bars[3].startswith("[###############...............] 2/4 two: 100%")
