"""`trouterctl batching plan`: without a daemon, without torch."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bench import step
from tests.models.tiny import tiny_qwen3
from trouterd import ctl
from trouterd.interpreter import environment, module_command

PAPER = ["batching", "plan", "--p", "0.35", "--latency-ms", "6.0,27.9", "--concurrency", "4"]
THREE = [
    "batching",
    "plan",
    "--matrix",
    ".5,.3,.2; .5,.3,.2; .5,.3,.2",
    "--latency-ms",
    "1+.01,3+.03,8+.05",
    "--concurrency",
    "8",
]


def answer(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> dict[str, Any]:
    assert ctl.main([*arguments, "--json"]) == ctl.EXIT_OK
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert ctl.main(PAPER) == ctl.EXIT_OK
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "4 requests in flight on 2 GPUs; share of steps: model 0 74.1%, model 1 25.9%"
    rows = [line.split() for line in lines[3:13]]
    assert [row[:3] for row in rows[:4]] == [
        ["1", "1", "187.2"],
        ["1", "2", "195.4"],
        ["1", "3", "208.0"],
        ["1", "4", "190.7"],
    ]
    assert [row[-1] for row in rows].index("best") == 2
    assert "B[n] of model 1 for n = 1 to 4: 1 2 2 3" in lines
    assert any(line.startswith("model 1 alone  143.4 token/s") for line in lines)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ([], ["hand-offs take no time (--handoff-ms)", "steps that feed prompts are left out"]),
        (["--handoff-ms", "0.3"], ["steps that feed prompts are left out"]),
    ],
)
def test_what_a_plan_leaves_out_is_told(
    options: list[str], told: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert ctl.main([*PAPER, *options]) == ctl.EXIT_OK
    assert capsys.readouterr().out.splitlines()[-1] == f"Optimistic: {'; '.join(told)}."
    assert answer(capsys, [*PAPER, *options])["optimistic"] == told


def test_costs(capsys: pytest.CaptureFixture[str]) -> None:
    result = answer(capsys, PAPER)
    best = result["best"]
    assert best["thresholds"] == [1, 3]
    assert best["tokens_per_second"] == pytest.approx(208.0, abs=0.1)
    assert best["ms_per_token"] == pytest.approx(4e3 / best["tokens_per_second"])
    assert best["gpu_seconds_per_1000_tokens"] == pytest.approx(2e3 / best["tokens_per_second"])
    assert result["eager"]["thresholds"] == [1, 1]
    assert result["slowest_alone"]["tokens_per_second"] == pytest.approx(4 / 27.9e-3)
    assert best["tokens_per_second"] < result["ideal_tokens_per_second"]
    assert result["lists"] == [[1, 1, 1, 1], [1, 2, 2, 3]]
    paid = answer(capsys, [*PAPER, "--gpus", "4"])["best"]
    assert paid["gpu_seconds_per_1000_tokens"] == pytest.approx(2 * best["gpu_seconds_per_1000_tokens"])


def test_shared_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    alone, shared = answer(capsys, PAPER), answer(capsys, [*PAPER, "--contention", "1.8,0.06"])
    assert (alone["gpus"], shared["gpus"]) == (2, 1)
    assert shared["eager"]["tokens_per_second"] < 0.8 * alone["eager"]["tokens_per_second"]
    assert answer(capsys, [*PAPER, "--contention", "1"]) == answer(capsys, [*PAPER, "--contention", "1,1"])


def test_models_that_take_turns(capsys: pytest.CaptureFixture[str]) -> None:
    beside, turns = answer(capsys, [*PAPER, "--contention", "1"]), answer(capsys, [*PAPER, "--turns"])
    assert (turns["gpus"], turns["best"]["method"]) == (1, "exact")
    # Thresholds with which models hardly ever run side by side are the best ones either way.
    assert turns["best"]["thresholds"] == beside["best"]["thresholds"] == [2, 3]
    assert turns["best"]["tokens_per_second"] == pytest.approx(beside["best"]["tokens_per_second"], rel=0.01)
    assert turns["eager"]["tokens_per_second"] > 1.05 * beside["eager"]["tokens_per_second"]
    assert ctl.main([*PAPER, "--turns", "--placement", "shared,separate"]) == ctl.EXIT_OK
    heads = [line for line in capsys.readouterr().out.splitlines() if "; share of steps" in line]
    assert [line.endswith("; one model at a time") for line in heads] == [True, False]
    assert ctl.main([*PAPER, "--turns", "--contention", "1"]) == ctl.EXIT_USAGE
    assert "--contention: models that take turns (--turns) never run side by side" in capsys.readouterr().err
    assert ctl.main([*THREE, "--turns"]) == ctl.EXIT_USAGE
    assert "turns: known for two models, not for 3" in capsys.readouterr().err


def test_hand_offs_that_take_time(capsys: pytest.CaptureFixture[str]) -> None:
    result, late = answer(capsys, [*PAPER, "--handoff-ms", "0"]), answer(capsys, [*PAPER, "--handoff-ms", "0.5"])
    assert result == answer(capsys, PAPER)
    assert late["best"]["method"] == "exact"
    # They cost more where a model waits for them.
    lost = {how: 1 - late[how]["tokens_per_second"] / result[how]["tokens_per_second"] for how in ("best", "eager")}
    assert 0 < lost["eager"] < lost["best"] < 0.03


def test_matrix_of_three_models(capsys: pytest.CaptureFixture[str]) -> None:
    kept = answer(capsys, [*THREE, "--commit", "keep"])
    assert kept["shares"] == pytest.approx([0.5, 0.3, 0.2])
    assert kept["best"]["thresholds"] == [1, 1, 1]
    assert kept["best"]["tokens_per_second"] == pytest.approx(1982, rel=0.01)
    # Half of the entry's tokens are dropped: a quarter of all.
    assert answer(capsys, THREE)["best"]["tokens_per_second"] == pytest.approx(0.75 * kept["best"]["tokens_per_second"])
    matrix = answer(capsys, [*THREE, "--commit", "2,2,2;2,2,2;2,2,2"])
    assert matrix["best"]["tokens_per_second"] == pytest.approx(2 * kept["best"]["tokens_per_second"])


def test_pair_as_matrix(capsys: pytest.CaptureFixture[str]) -> None:
    matrix = ["batching", "plan", "--matrix", "0.65,0.35;1,0", *PAPER[4:]]
    assert answer(capsys, matrix) == answer(capsys, PAPER)
    stay = answer(capsys, [*PAPER, "--q", "0.25"])
    assert stay == answer(capsys, ["batching", "plan", "--matrix", "0.65,0.35;0.25,0.75", *PAPER[4:]])
    assert stay["shares"] == pytest.approx([0.25 / 0.6, 0.35 / 0.6])


def step_file(path: Path, times: dict[int, float], context: int = 128) -> Path:
    """As bench.step writes it, with a second, longer context."""
    cases = [{"batch": batch, "context": context, "wall_ms": ms, "floor_ms": 0.1} for batch, ms in times.items()]
    longer = [case | {"context": 16 * context, "wall_ms": 2 * times[case["batch"]]} for case in cases]  # type: ignore[index]
    path.write_text(json.dumps({"model": {"name": "m"}, "decode": [*cases, *longer], "skipped": []}))
    return path


def test_measured_step_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [
        "--step", str(step_file(tmp_path / "small.json", {1: 6.0, 4: 6.0})),
        "--step", str(step_file(tmp_path / "large.json", {1: 27.9, 4: 27.9})),
    ]  # fmt: skip
    measured = ["batching", "plan", "--p", "0.35", *files, "--concurrency", "4"]
    result = answer(capsys, measured)
    assert result["best"]["tokens_per_second"] == pytest.approx(208.0, abs=0.1)
    longer = answer(capsys, [*measured, "--context", "1500"])
    shortest = "steps are those of the shortest context in the files (--context)"
    assert [shortest in told["optimistic"] for told in (answer(capsys, measured), longer)] == [True, False]
    assert longer["best"]["tokens_per_second"] == pytest.approx(result["best"]["tokens_per_second"] / 2)


def test_rows_of_a_visit_take_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rarely handed over: the large model is fed ten rows a visit, by a third number or by extend steps of the file."""
    rest = ["--concurrency", "16"]
    start = ["batching", "plan", "--p", "0.1"]
    plain = answer(capsys, [*start, "--latency-ms", "1,18.28", *rest])
    rows = [*start, "--latency-ms", "1,18.28+0+.1", *rest]
    found = answer(capsys, rows)
    assert found["rows_per_step"] == pytest.approx([1, 10])
    assert found["best"]["tokens_per_second"] < 0.8 * plain["best"]["tokens_per_second"]
    # Without routing it takes decode steps.
    assert found["slowest_alone"]["tokens_per_second"] == pytest.approx(16 / (18.28 + 1.6) * 1e3)
    assert ctl.main(rows) == ctl.EXIT_OK
    head = capsys.readouterr().out.splitlines()[0]
    assert head.endswith("model 1 9.1%; rows per request and step: model 0 1.0, model 1 10.0")
    assert ctl.main([*rows, "--placement", "shared"]) == ctl.EXIT_OK
    assert "; rows per request and step: model 0 1.0, model 1 10.0; contention: " in capsys.readouterr().out

    small = step_file(tmp_path / "small.json", {1: 1.0, 16: 1.0})
    large = step_file(tmp_path / "large.json", {1: 18.38, 16: 19.88})
    measured = json.loads(large.read_text())
    measured["extend"] = [
        {"batch": batch, "count": count, "context": 1024, "wall_ms": 20 + 0.1 * batch * count}
        for batch in (1, 16)
        for count in (1, 16)
    ]
    large.write_text(json.dumps(measured))
    files = answer(capsys, [*start, "--step", str(small), "--step", str(large), *rest])
    assert files["best"]["tokens_per_second"] == pytest.approx(found["best"]["tokens_per_second"], rel=1e-6)


OUTLOOK = ["batching", "plan", "--p", "0.35", "--latency-ms", "1+.02,18.2+.038", "--placement", "shared,separate"]


def test_two_placements(capsys: pytest.CaptureFixture[str]) -> None:
    result = answer(capsys, [*OUTLOOK, "--concurrency", "1,16"])
    shared, separate = result["placements"]
    assert (shared["gpus"], separate["gpus"]) == (1, 2)
    assert (shared["contention"], separate["contention"]) == ([1.5, 0.35], [0, 0])
    assert result["large_only"] == "model 1"
    for place in (shared, separate):
        alone, busy = place["expected"]
        assert (alone["concurrency"], busy["concurrency"]) == (1, 16)
        assert alone["large_only"]["tokens_per_second"] == pytest.approx(1e3 / 18.238)
        assert alone["speed_up"] == pytest.approx(alone["tokens_per_second"] * 18.238e-3)
        # Without routing the large model needs one GPU, whatever the placement.
        assert alone["large_only"]["gpu_seconds_per_1000_tokens"] == pytest.approx(18.238)
        assert busy["cost_ratio"] == pytest.approx(place["gpus"] / busy["speed_up"])
        assert busy["eager_tokens_per_second"] < busy["tokens_per_second"] < busy["ideal_tokens_per_second"]
    given = answer(capsys, ["batching", "plan", *OUTLOOK[2:6], "--contention", "1.5,0.35", "--concurrency", "16"])
    assert given["best"]["tokens_per_second"] == shared["expected"][1]["tokens_per_second"]


def test_outlook_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert ctl.main([*OUTLOOK, "--concurrency", "1,16", "--price", "3.6"]) == ctl.EXIT_OK
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("shared, 1 GPU; share of steps: model 0 74.1%, model 1 25.9%; contention: model 0 1.5, ")
    assert lines[6].startswith("separate, 2 GPUs; ")
    assert lines[2].split("  ")[0] == "REQUESTS"
    cells = lines[4].split()
    assert cells[:3] == ["16", "2", "15"]
    # 3.6 an hour is 0.001 a second: 1,000,000 tokens cost what 1,000 take, in seconds.
    assert cells[5] == cells[6]
    assert lines[-3].startswith("x model 1: against model 1 without routing")


def test_gpus_of_each_model(capsys: pytest.CaptureFixture[str]) -> None:
    """A large model over two GPUs, which the small one shares, or has a third one beside."""
    shared, separate = answer(capsys, [*OUTLOOK, "--concurrency", "4", "--gpus", "1,2"])["placements"]
    assert (shared["gpus"], separate["gpus"]) == (2, 3)
    assert shared["gpus_of_large_only"] == separate["gpus_of_large_only"] == 2
    assert answer(capsys, [*PAPER, "--gpus", "1,2"])["gpus"] == 3


def test_files_of_the_bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What bench.step writes, with other times."""
    files = []
    for name, layers in (("small", 1), ("large", 8)):
        model = tiny_qwen3(tmp_path / name, layers=layers, hidden=16, heads=2, kv_heads=1)
        cases = ["--sections=decode", "--batches=1,4", "--contexts=20", "--steps=20", "--seconds=0.05"]
        where = ["--device=cpu", "--dtype=float32"]
        file = tmp_path / f"{name}.json"
        assert step.main([f"--model={model}", *where, *cases, f"--json={file}"]) == 0
        # What it has measured is up to the host.
        measured = json.loads(file.read_text())
        for case in measured["decode"]:
            case["wall_ms"] = layers + case["batch"] / 4
        file.write_text(json.dumps(measured))
        files += ["--step", str(file)]
    times = [1.25, 8.25]
    capsys.readouterr()
    plan = ["batching", "plan", "--p", "0.35", *files, "--placement", "shared,separate", "--concurrency", "1,4"]
    result = answer(capsys, plan)
    assert result["large_only"] == "large"
    for place in result["placements"]:
        alone, busy = place["expected"]
        assert alone["tokens_per_second"] == pytest.approx(1e3 / (times[0] / 1 + 0.35 * times[1]), rel=1e-3)
        assert busy["tokens_per_second"] > alone["tokens_per_second"]
    assert ctl.main(plan) == ctl.EXIT_OK
    assert "X LARGE" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "not a result of bench.step"),
        ("[1", "not a result of bench.step"),
        ("[" * 100_000, "not a result of bench.step"),
        ('{"decode": []}', "no decode step was measured"),
        ('{"decode": [{"batch": 1, "context": 5, "wall_ms": -1}]}', "not a result of bench.step"),
        ('{"decode": [], "extend": [{"batch": 1, "context": 5, "wall_ms": 1}]}', "not a result of bench.step"),
        (None, "No such file"),
    ],
)
def test_unusable_files(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, message: str) -> None:
    path = tmp_path / "step.json"
    if content is not None:
        path.write_text(content)
    files = ["--step", str(path), "--step", str(path)]
    assert ctl.main(["batching", "plan", "--p", "0.3", *files, "--concurrency", "4"]) == ctl.EXIT_USAGE
    complaint = capsys.readouterr().err
    assert complaint.startswith(f"trouterctl batching plan: error: {path}: ")
    assert message in complaint


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["batching"], "ACTION"),
        (["batching", "plan", "--p", "1.5", *PAPER[4:]], "--p: expected a probability, got '1.5'"),
        (["batching", "plan", "--p", "x", *PAPER[4:]], "--p: expected a probability, got 'x'"),
        (["batching", "plan", *PAPER[4:]], "--p --matrix is required"),
        ([*PAPER[:-1], "0"], "--concurrency: expected a whole number"),
        ([*PAPER[:-1], "2.5"], "--concurrency: expected a whole number"),
        ([*PAPER[:-1], "1000000"], "--concurrency: expected at most 16384, got '1000000'"),
        ([*PAPER, "--latency-ms", "6,-1"], "--latency-ms: expected milliseconds"),
        ([*PAPER, "--latency-ms", "6,8+1+1+1"], "--latency-ms: expected milliseconds"),
        ([*PAPER, "--latency-ms", "6,8+1+"], "--latency-ms: expected milliseconds"),
        ([*PAPER, "--handoff-ms", "-1"], "--handoff-ms: expected milliseconds of 0 or more"),
        ([*PAPER, "--placement", "here"], "--placement: expected shared, separate or both, got 'here'"),
        ([*PAPER, "--contention", "nan"], "--contention: expected numbers of 0 or more"),
    ],
)
def test_wrong_usage(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        ctl.main(arguments)
    assert caught.value.code == ctl.EXIT_USAGE
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["batching", "plan", "--matrix", "0.6,0.3;1,0", *PAPER[4:]],
            "routing: the row [0.6, 0.3] sums to 0.9, not to 1",
        ),
        (["batching", "plan", "--matrix", "1;1", *PAPER[4:]], "routing: 2 models need 2 rows of 2, got rows of 1 / 1"),
        ([*THREE, "--q", "0.5"], "--q belongs to --p"),
        ([*THREE, "--commit", "1,1;1,1"], "commit: 3 models need 3 rows of 3"),
        ([*PAPER, "--contention", "1,1,1"], "contention: 3 values for 2 models"),
        ([*PAPER, "--context", "128"], "--context belongs to --step"),
        ([*PAPER, "--latency-ms", "1e-6,1e9"], "step times: 1e-06 ms for one request and 1e+09 ms for 4 are more than"),
        ([*PAPER, "--latency-ms", "1,2,3"], "--latency-ms: --p is between two models, entry first, and here are 3"),
        ([*PAPER, "--latency-ms", "6"], "--latency-ms: --p is between two models, entry first, and here are 1"),
        ([*PAPER, "--gpus", "1,1,1"], "--gpus: 3 numbers for 2 models"),
        ([*OUTLOOK, "--concurrency", "4", "--gpus", "2"], "--gpus: with --placement it takes one number per model"),
        ([*THREE, "--placement", "shared"], "--placement shared: for three or more models no factors are known"),
    ],
)
def test_options_that_do_not_fit(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ctl.main(arguments) == ctl.EXIT_USAGE
    complaint = capsys.readouterr().err
    assert complaint.startswith("trouterctl batching plan: error: ")
    assert message in complaint


def test_plans_without_torch() -> None:
    code = f"import sys; from trouterd import ctl; ctl.main({PAPER}); sys.exit('torch' in sys.modules)"
    done = subprocess.run([module_command("x")[0], "-c", code], env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "208.0" in done.stdout
