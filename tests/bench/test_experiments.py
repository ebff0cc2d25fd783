"""Experiments on real daemons, in seconds."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from bench import experiments
from bench.experiment_result import read_results
from bench.experiment_setup import Setup, head_inputs, short
from bench.throughput import main
from trouterd.demo import SMALL_DIRECTORY

SCRIPTS = ["--small", "script:2", "--large", "script:8"]
BUILTIN = ["--small", "builtin:small", "--large", "builtin:large"]
QUICK = ["--seconds", "0.5", "--settle", "0.2", "--learn", "0.5", "--workloads", "20/2000"]


def windows(folder: Path) -> dict[str, dict[str, Any]]:
    """By key, of all results."""
    return {record.case.key: dict(record.window) for one in read_results(folder) for record in one.records}


@pytest.mark.slow
def test_algorithms_on_scripts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--experiment", "a", *SCRIPTS, *QUICK, "--streams", "1,2", "--patterns", "r2r-35,r2r-10"]
    only = "trouterd/*/large/*,*/small/*,*/r2r-??/planned/2,std serving/*/r2r-35/*/2,step-synchronous/*,by itself/*/2"
    assert main([*arguments, "--only", only, "--output", str(tmp_path)]) == 0
    found = windows(tmp_path)
    assert list(found) == [
        *(f"trouterd/20/2000/{name}/-/{count}" for name in ("large", "small") for count in (1, 2)),
        "trouterd/20/2000/r2r-35/planned/2",
        "trouterd/20/2000/r2r-10/planned/2",
        "step-synchronous/20/2000/r2r-35/-/2",
        "std serving/20/2000/r2r-35/-/2",
        "by itself/20/2000/large/-/2",
    ]
    assert found["by itself/20/2000/large/-/2"]["large_forwards_per_1000"] == pytest.approx(500, rel=0.1)
    assert all(window["tokens_per_second"] > 0 for window in found.values())
    (result,) = read_results(tmp_path)
    assert result.complete
    assert result.head["heads"] is False
    assert result.head["command"] == shlex.join(
        ["python", "-m", "bench.throughput", *arguments, "--only", only, "--output", str(tmp_path)]
    )
    often, rarely = (found[f"trouterd/20/2000/r2r-{share}/planned/2"]["tokens_per_model"] for share in ("35", "10"))
    assert often["large"] / often["small"] > 1.5 * rarely["large"] / rarely["small"] > 0
    facts = {record.case.key: record.facts for record in result.records}
    assert facts["trouterd/20/2000/r2r-35/planned/2"]["predicted"] > 0
    capsys.readouterr()
    assert main(["--report", str(tmp_path)]) == 0
    assert "script-2+script-8, on the CPU" in capsys.readouterr().out


@pytest.mark.slow
def test_heads_of_the_demo_pair(tmp_path: Path) -> None:
    """CITER's head really runs in the worker, and its decisions are drawn: 13.5 % of the tokens are the large model's."""
    models = ["--small", "builtin:small", "--large", "builtin:large"]
    quick = ["--seconds", "2", "--settle", "0.2", "--workloads", "8/200", "--streams", "8", "--patterns", "citer"]
    only = "*/large/*,*/small/*,*/citer/planned/*"
    assert main(["--experiment", "c", *models, *quick, "--only", only, "--output", str(tmp_path)]) == 0
    (result,) = read_results(tmp_path)
    assert result.head["heads"] is True
    assert result.head["names"] == {"citer": "CITER, p = 0.135"}
    tokens = windows(tmp_path)["trouterd/8/200/citer/planned/8"]["tokens_per_model"]
    count = 2 * sum(tokens.values())
    share = tokens["large"] / sum(tokens.values())
    assert abs(share - 0.135) < 4 * (0.135 * 0.865 / count) ** 0.5


@pytest.mark.slow
def test_wrong_thresholds_and_switching(tmp_path: Path) -> None:
    arguments = [*SCRIPTS, *QUICK, "--patterns", "r2r-35", "--output", str(tmp_path)]
    assert main(["--experiment", "e", *arguments, "--streams", "4", "--only", "*/small/*,*/large/*,*planned*/4"]) == 0
    (result,) = read_results(tmp_path)
    thresholds = {one.case.batching: one.facts["thresholds"]["large"] for one in result.records if one.case.batching}
    assert thresholds["planned x 0.25"] == 1
    assert thresholds["planned x 4"] == 4
    # What two factors come to is measured once.
    by_thresholds: dict[int, set[str]] = {}
    for one in result.records:
        if one.case.batching.startswith("planned x"):
            by_thresholds.setdefault(one.facts["thresholds"]["large"], set()).add(json.dumps(one.window))
    assert all(len(found) == 1 for found in by_thresholds.values())
    copies = [one for one in result.records if "same_as" in one.facts]
    assert len(copies) == len(result.records) - len({json.dumps(one.window) for one in result.records}) > 0
    assert main(["--experiment", "d", *arguments, "--streams", "1", "--only", "*/every:1/*,*/every:8/*"]) == 0
    found = windows(tmp_path)
    often, rarely = (found[f"trouterd/20/2000/every:{n}/eager/1"]["handoffs_per_100"] for n in (1, 8))
    assert often == pytest.approx(200, rel=0.05)
    assert rarely == pytest.approx(25, rel=0.2)


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    pair = ["--small", "Qwen3-0.6B", "--large", "Qwen3-32B", "--devices", "cuda:0"]
    assert main(["--experiment", "a", *pair, "--list", "--budget", "600"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "trouterd: 45 s to start"
    # R-Stitch's head is the fourth one: a second daemon, whose windows go before the first one's important ones.
    assert "trouterd 2: 45 s to start" in printed
    # The large model alone for 10 s at most; 16 streams begin with prompts of 1,124 tokens in the mean, which take 2 s.
    assert "  trouterd/low/large/-/16   importance 0, 14 s" in printed
    assert "  trouterd/low/small/-/1   importance 8, 5.12 s" in printed
    assert "  trouterd/low/r2r-35/planned/16   importance 2, 27 s" in printed
    assert float(printed[-1].split()[0]) <= 600
    dropped = [line for line in printed if line.endswith("dropped")]
    kept = [line.split("   ")[0] for line in printed if "importance" in line and line not in dropped]
    # Every algorithm at the first number of streams, before any at all of them; no model alone without a route beside it.
    assert all(
        any(f"/{key}/planned/16" in line for line in kept) for key in ("r2r-35", "r2r-10", "citer", "collm", "rstitch")
    )
    assert not any("/low/r2r-35/planned/64" in line for line in kept)
    counts = [{key.rsplit("/", 1)[1] for key in kept if part in key} for part in ("/large/", "/small/", "/planned/")]
    assert counts == [{"16", "1"}] * 3
    assert all("/low/" in line for line in kept)


def test_repeats_cost_their_time(capsys: pytest.CaptureFixture[str]) -> None:
    listed = ["--experiment", "e", *SCRIPTS, "--streams", "4", "--only", "*/r2r-35/planned/*", "--list"]
    for repeats, seconds in ((1, 25), (3, 75)):
        assert main([*listed, "--repeats", str(repeats)]) == 0
        assert f"trouterd/low/r2r-35/planned/4   importance 1, {seconds} s" in capsys.readouterr().out


def test_a_sweep_of_one_card_fits_into_six_minutes(capsys: pytest.CaptureFixture[str]) -> None:
    """Of a machine on which a daemon takes 35 s to start: every division, and turns by plan."""
    pair = ["--small", "Qwen3-0.6B", "--large", "Qwen3-32B", "--devices", "cuda:0"]
    quick = ["--seconds", "4", "--settle", "1", "--start", "35", "--list", "--budget"]
    assert main(["--experiment", "f", *pair, *quick, "340"]) == 0
    listed = capsys.readouterr().out
    kept = [
        line.split("   ")[0].strip() for line in listed.splitlines() if "importance" in line and "dropped" not in line
    ]
    eager = [f"kernel at {percent} %/low/r2r-35/eager/{count}" for percent in (12, 20, 60, 80) for count in (16, 64)]
    assert set(eager) <= set(kept)
    assert "kernel at 40 %" not in listed
    assert {"trouterd/low/r2r-35/eager/64", "turns/low/r2r-35/planned/64", "trouterd/low/large/-/64"} <= set(kept)
    # In turns the whole card is usual.
    assert main(["--experiment", "f", *pair, *quick, "340", "--set", "batching.overlap=false"]) == 0
    assert "kernel at 40 %" in capsys.readouterr().out
    # All of it at 16 and 64 streams; nothing at fewer, nor with limits of the large model, before that.
    assert main(["--experiment", "f", *pair, *quick, "490"]) == 0
    listed = capsys.readouterr().out
    dropped = [line for line in listed.splitlines() if line.endswith("dropped")]
    assert not [line for line in dropped if "kernel at" in line and line.split("   ")[0].endswith(("/16", "/64"))]
    assert all(line.endswith("dropped") for line in listed.splitlines() if "large at" in line and "importance" in line)
    assert main(["--experiment", "f", *pair, *quick, "420", "--set", "small.megakernel_percent=30"]) == 0
    listed = capsys.readouterr().out
    assert "kernel at 80 %: 35 s to start" in listed
    assert "kernel at 30 %" not in listed
    assert "kernels at 20 + 80 %: 35 s to start" in listed
    assert main(["--experiment", "f", *pair, *quick, "420", "--set", "*.megakernel=off"]) == 0
    assert "kernel" not in capsys.readouterr().out
    both = [f"{name}.{key}" for name in ("small", "large") for key in ("megakernel=on", "megakernel_percent=50")]
    assert main(["--experiment", "f", *pair, *quick, "420", *(part for one in both for part in ("--set", one))]) == 0
    listed = capsys.readouterr().out
    assert "kernel at 40 %: " in listed
    assert not [part for part in ("kernel at 60 %", "kernel at 80 %", "kernels at", "a kernel each") if part in listed]
    assert main(["--experiment", "f", *pair, *quick, "420", "--set", "batching.overlap=false"]) == 0
    listed = capsys.readouterr().out
    assert "kernel at 40 %: " in listed, "in turns the usual part is the whole"
    assert "a kernel each" not in listed


def test_every_experiment_can_be_listed(capsys: pytest.CaptureFixture[str]) -> None:
    pair = ["--small", "Qwen3-0.6B", "--large", "Qwen3-32B"]
    seen = {}
    for experiment in "abcdefg":
        for devices in ("cpu", "cuda:0", "cuda:0,cuda:1"):
            assert main(["--experiment", experiment, *pair, "--devices", devices, "--list"]) == 0
            seen[experiment, devices] = capsys.readouterr().out
    assert "no MPS/" in seen["b", "cuda:0"]
    assert "no graphs/" in seen["b", "cuda:0,cuda:1"]
    assert "no MPS/" not in seen["b", "cuda:0,cuda:1"]
    assert "no graphs/" not in seen["b", "cpu"]
    assert "large at 80 %/" in seen["f", "cuda:0"]
    assert "large at 80 %/" not in seen["f", "cuda:0,cuda:1"]
    assert "turns, a kernel each/low/r2r-35/planned/4" in seen["f", "cuda:0"]
    assert "a kernel each" not in seen["f", "cpu"] + seen["f", "cuda:0,cuda:1"]
    assert "turns/" in seen["f", "cpu"]
    assert "turns/" not in seen["f", "cuda:0,cuda:1"]
    three = [*pair, "--middle", "Qwen3-8B", "--devices", "cuda:0,cuda:1,cuda:2"]
    assert main(["--experiment", "a", *three, "--list"]) == 0
    listed = capsys.readouterr().out
    assert "/middle/" in listed
    assert "/me/planned/16" in listed
    assert "r2r" not in listed
    assert "std serving: 5 s to start" in seen["c", "cpu"]
    assert main(["--experiment", "c", *pair, "--no-std-servers", "--list"]) == 0
    printed = capsys.readouterr().out
    assert "std serving: " not in printed
    assert "std serving/low/r2r-35/-/16" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--experiment", "a", "--output", "x"], "--small and --large name the models"),
        (["--experiment", "a", *SCRIPTS], "--output names the folder"),
        (["--experiment", "a", *SCRIPTS, "--only", "large"], "--only large: no window has such a key"),
        (
            ["--experiment", "a", *SCRIPTS, "--patterns", "me"],
            "--patterns: no pattern 'me' of 2 models; there are r2r-35",
        ),
        (["--experiment", "a", *SCRIPTS, "--devices", "cpu,cpu,cpu"], "--devices: 3 given for 2 models"),
        (["--experiment", "a", *SCRIPTS, "--step", "x"], "--step: 1 files for the models small, large"),
        (
            ["--experiment", "a", *SCRIPTS, "--workloads", "mild"],
            "--workloads: workload mild: neither low, high, agent",
        ),
        (["--experiment", "a", *SCRIPTS, "--contention", "1,2,3"], "--contention: 3 given for 2 models"),
        (["--experiment", "a", *SCRIPTS, "--set", "small.dept=1"], "unknown key 'dept'; did you mean 'depth'?"),
        (["--experiment", "a", *SCRIPTS, "--model-set", "sm_percent=9"], "sm_percent: limits a model on a GPU"),
        (["--experiment", "a", *SCRIPTS, "--repeats", "0", "--list"], "--repeats: expected a whole number from 1 on"),
        (["--experiment", "h"], "--output names the folder"),
        (["--experiment", "z", *SCRIPTS], "error: --experiment: no experiment 'z'; there are a, b, c, d, e, f, g, h"),
        (["--experiment", "c,z", *SCRIPTS], "error: --experiment: no experiment 'z'"),
        (["--experiment", "c,", *SCRIPTS], "error: --experiment: no experiment ''"),
        (["--experiment", "c,e,c", *SCRIPTS], "error: --experiment: c is named twice"),
        (["--experiment", "c,h", *SCRIPTS], "error: --experiment: h asks another pair of models"),
        (["--experiment", "h,c", "--list"], "error: --experiment: h asks another pair of models"),
        (["--experiment", "c,d", *SCRIPTS, "--only", "*/every:1/*"], "no window of experiment c has such a key"),
        (
            ["--experiment", "a", *SCRIPTS, "--output", "nosuch", "--only", "*/large/*,*/r2r-35/planned/*"],
            "planned/16 needs a plan, and small alone on low is not among the windows; add '*/low/small/*', or",
        ),
        (["--experiment", "h", "--list", "--sweeps", "entropi"], "--sweeps: no sweep is called 'entropi'"),
        (["--experiment", "h", "--list", "--streams", "1,2"], "--streams: experiment h takes one number"),
        (["--experiment", "h", "--list", "--budget", "9"], "--budget does not go with experiment h"),
        (["--experiment", "h", "--list", *SCRIPTS], "--small does not go with experiment h"),
        (["--experiment", "a", *SCRIPTS, "--list", "--points", "3"], "--points is for experiment h alone"),
        (["--experiment", "a", *BUILTIN, "--list"], "low (2,148 tokens), agent (9,216 tokens)"),
        (["--experiment", "c", *BUILTIN, "--list"], "name others, such as --workloads 100/256"),
        (
            ["--experiment", "c", *SCRIPTS, "--list", "--workloads", "20/9,high", "--context", "4096"],
            "--workloads 20/9",
        ),
        (
            ["--experiment", "a", "--small", "nosuch", "--large", "script:8", "--list"],
            "--small nosuch: no such directory",
        ),
        (["--experiment", "a", "--small", "script:2", "--large", "script:x", "--list"], "--large script:x: expected"),
        (["--report", "nosuch"], "--report: nosuch: holds no result"),
        (["--experiment", "a", *SCRIPTS, "--list", "--seconds", "0"], "--seconds: expected a number above 0, got '0'"),
        (["--experiment", "a", *SCRIPTS, "--list", "--budget", "-5"], "--budget: expected a number of 0 or more"),
        (["--experiment", "a", *SCRIPTS, "--list", "--settle", "nan"], "--settle: expected a number of 0 or more"),
        (["--experiment", "a", *SCRIPTS, "--list", "--devices", ","], "--devices: expected cpu or a CUDA device"),
        (["--experiment", "a", *SCRIPTS, "--devices", "cuda:99", "--output", "nosuch"], "--devices: cuda:99, but this"),
    ],
)
def test_wrong_usage(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """All have one exit code and one prefix."""
    try:
        code = experiments.main(arguments)
    except SystemExit as left:
        code = left.code
    assert code == 2
    complaint = capsys.readouterr().err.splitlines()[-1]
    assert complaint.startswith("bench.throughput: error: ")
    assert message in complaint


@pytest.mark.parametrize("place", [0, 2, 4])
def test_the_experiment_can_be_named_anywhere(place: int, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*SCRIPTS, "--list"]
    assert main([*arguments[:place], "--experiment=c", *arguments[place:]]) == 0
    assert "windows" in capsys.readouterr().out
    assert main([*SCRIPTS[:place], "--report", "nosuch"]) == 2
    assert capsys.readouterr().err.startswith("bench.throughput: error: ")


def test_what_is_named_twice_is_measured_once(capsys: pytest.CaptureFixture[str]) -> None:
    listed = []
    for times in (1, 2):
        given = {"--streams": "2", "--workloads": "20/9", "--patterns": "r2r-35"}
        twice = [part for name, value in given.items() for part in (name, ",".join([value] * times))]
        assert main(["--experiment", "a", *SCRIPTS, *twice, "--list"]) == 0
        listed.append(capsys.readouterr().out)
    assert listed[0] == listed[1]


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is started."""
    output = tmp_path / "file"
    output.touch()
    assert main(["--experiment", "a", *SCRIPTS, "--output", str(output)]) == 1
    assert capsys.readouterr().err == f"bench.throughput: --output: cannot make the folder {output}: File exists\n"


def test_the_frontier_can_be_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--experiment", "h", "--sweeps", "r2r,bernoulli", "--points", "3", "--problems", "9", "--list"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "  r2r   threshold, up to 3 points   after training a head",
        "  bernoulli   p, up to 3 points",
        "8 points, the two models alone among them, of 9 questions at N = 16",
    ]


def test_setups() -> None:
    def setup(*devices: str, tensor_parallel: tuple[int, ...] = (1, 1)) -> Setup:
        return Setup(("Qwen3-0.6B", "Qwen3-32B"), devices, tensor_parallel)

    assert setup("cpu", "cpu").placement == "cpu"
    assert setup("cuda:0", "cuda:0").placement == "shared"
    assert setup("cuda:0", "cuda:1").placement == "separate"
    assert setup("cuda:0", "cuda:0", tensor_parallel=(1, 2)).placement == "shared"
    assert setup("cuda:0", "cuda:0", tensor_parallel=(1, 2)).pair == "Qwen3-0.6B+Qwen3-32B-TP2"
    assert setup("cuda:0", "cuda:0").contention == (1.5, 0.35)
    assert setup("cuda:0", "cuda:1").contention == ()
    given = Setup(("Qwen3-0.6B", "Qwen3-32B"), ("cuda:0", "cuda:1"), (1, 1), given_contention=(0.1, 4.0))
    assert given.contention == (0.1, 4.0)
    assert [short(source) for source in ("builtin:small", "script:6", "/models/Qwen3-8B/")] == [
        "small",
        "script-6",
        "Qwen3-8B",
    ]
    inputs = head_inputs("Qwen3-0.6B")
    assert inputs is not None
    assert (inputs.hidden, inputs.vocabulary) == (1024, 151_936)
    assert head_inputs("builtin:small") == head_inputs(str(SMALL_DIRECTORY))
    assert head_inputs("script:6") is None


def test_a_command_can_be_pasted_and_a_run_without_a_window_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A budget for nothing: no daemon starts, one line tells it, and a report of it says nothing of routing."""
    arguments = [
        "--experiment",
        "a",
        "--small",
        "script:6",
        "--large",
        "script:28",
        "--only",
        "*/low/*",
        "--budget",
        "0",
    ]
    arguments += ["--note", "two words; one's", "--output", str(tmp_path)]
    assert main(arguments) == 1
    (line,) = capsys.readouterr().err.splitlines()
    (result,) = read_results(tmp_path)
    count = len(result.dropped)
    assert count > 20
    assert line == f"[{count}/{count}] no time left: {count} dropped: everything"
    assert shlex.split(result.head["command"]) == ["python", "-m", "bench.throughput", *arguments]
    assert main(["--report", str(tmp_path)]) == 0
    text = (tmp_path / "report.md").read_text()
    assert text.startswith("# Throughput of token routing")
    assert "drawn at" not in text
    assert f"\n  ```sh\n  {result.head['command']}\n  ```\n" in text
    assert f"{count} dropped: everything." in text
