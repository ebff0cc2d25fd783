"""bench.frontier on scripted models: what it measures, writes and refuses."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from algorithms import registry
from bench import frontier
from bench.daemon import Served, running
from bench.frontier_fault import FrontierError
from bench.frontier_heads import Training, given_heads, refined, trained_heads
from bench.frontier_judge import RULES, Rule, is_right
from bench.frontier_pair import demo_pair
from bench.frontier_point import Point
from bench.frontier_report import LARGE, SMALL, good_enough, pareto, points_table, resolution
from bench.frontier_sweeps import SWEEPS, Sweep, named, of_route
from bench.frontier_task import demo_task, file_task
from tests.models.tiny import EOS, byte_tokenizer
from trouterd.demo import LARGE_DIRECTORY, SMALL_DIRECTORY
from trouterd.training.train import sidecar_path

WRONG, RIGHT = "The answer is 4.", "The answer is 7."
"""They differ at output index 14."""
QUESTIONS = 5


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two scripted models, the large one right, and routes over them."""
    folder = tmp_path_factory.mktemp("frontier")
    tokenizer = byte_tokenizer(folder / "tokenizer", template_bos=False, add_bos=False)
    lines = []
    for name, text in (("small", WRONG), ("large", RIGHT)):
        (folder / f"{name}.json").write_text(json.dumps({"vocab_size": 258, "eos": EOS, "ids": list(text.encode())}))
        lines += [f"[models.{name}]", f'path = "{name}.json"', 'format = "script"', f'tokenizer = "{tokenizer}"']
    for name, algorithm, params in (
        ("visits", "every_n", '{ shape = "visit", n = 1 }'),
        ("chance", "bernoulli", "{ p = 0.5 }"),
        ("ask", "query", '{ source = "random", threshold = 0.5 }'),
    ):
        lines += [f"[routes.{name}]", 'models = ["small", "large"]', f'algorithm = "{algorithm}"', f"params = {params}"]
    file = folder / "given.toml"
    file.write_text("\n".join(lines) + "\n")
    return file


@pytest.fixture(scope="module")
def daemon(config: Path) -> Iterator[Served]:
    with running(config.parent, config.read_text()) as served:
        yield served


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """Questions of both forms; the right answer is always 7."""
    file = tmp_path / "questions.jsonl"
    lines: list[dict[str, Any]] = [{"messages": [{"role": "user", "content": f"{n}?"}], "answer": 7} for n in range(3)]
    lines += [{"prompt": f"{n}?", "answer": "7.0", "id": n} for n in range(QUESTIONS - len(lines))]
    file.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    return file


def result(folder: Path) -> dict[tuple[str, float], dict[str, Any]]:
    """Points by sweep and value."""
    content = json.loads((folder / "frontier.json").read_text())
    return {(point["sweep"], point["value"]): point for point in content["points"]}


@pytest.mark.slow
def test_a_daemon_of_its_own(config: Path, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--output", str(tmp_path), "--config", str(config), "--route", "visits", "--dataset", str(dataset)]
    arguments += ["--only", "every_n,citer", "--sweep", "ask:threshold=2,0", "--streams", "2"]
    assert frontier.main(arguments) == 0
    points = result(tmp_path)
    assert {key: point["accuracy"] for key, point in points.items()} == {
        (SMALL, 0.0): 0.0,
        (LARGE, 0.0): 1.0,
        **{("every_n", n): float(15 % n == 0) for n in (20, 10, 5, 3, 2)},  # the large model writes index 14, or not
        ("ask", 2.0): 0.0,
        ("ask", 0.0): 1.0,
    }
    length = points[SMALL, 0.0]["tokens_per_answer"]
    assert length == len(WRONG) + 1  # the end of an answer is a token too
    for n in (20, 10, 5, 3, 2):
        visits = length // n
        point = points["every_n", n]
        assert point["large_share"] == pytest.approx(visits / length)
        assert point["handoffs_per_100"] == pytest.approx(100 * 2 * visits / length, rel=0.1)
        # Each visit is a step of the large model; its prefill may have been a step before the first one, or in it.
        assert visits <= point["large_forwards"] <= visits + 1
    assert points[SMALL, 0.0]["large_forwards"] == points["ask", 2.0]["large_forwards"] == 0
    assert points[LARGE, 0.0]["large_forwards"] == points["ask", 0.0]["large_forwards"] == length
    printed, said = capsys.readouterr()
    assert "no --train-prompts and no --checkpoint, so without citer" in said
    assert printed == (tmp_path / "frontier.md").read_text() + "\n"
    assert "| every_n | n = 5 | 100.0% | 17.6% |" in printed
    assert (
        f", commit {json.loads((tmp_path / 'frontier.json').read_text())['commit']}: `python -m bench.frontier "
        in printed
    )
    content = json.loads((tmp_path / "frontier.json").read_text())
    assert content["command"] == " ".join(["python -m bench.frontier", *arguments])
    assert content["task"] == {"name": "questions.jsonl", "questions": QUESTIONS, "judge": "exact", "max_tokens": 512}
    assert {"hardware", "versions", "commit"} < content.keys()
    with Image.open(tmp_path / "frontier.png") as image:
        image.verify()
    assert ElementTree.parse(tmp_path / "frontier.svg").getroot().tag.endswith("svg")  # noqa: S314 (our own file)
    drawn = (tmp_path / "frontier.svg").read_text()
    assert all(f"<!-- {name} -->" in drawn for name in ("every_n", "ask", "Pareto line", LARGE))


def test_a_running_daemon(daemon: Served, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--output", str(tmp_path), "--socket", str(daemon.socket), "--route", "visits"]
    assert frontier.main([*arguments, "--dataset", str(dataset), "--judge", "last_number", "--points", "2"]) == 0
    assert list(result(tmp_path)) == [
        (SMALL, 0.0),
        (LARGE, 0.0),
        ("visits", 20),
        ("visits", 2),
        ("chance", 0.05),
        ("chance", 0.8),
    ]
    assert "route ask is left out; name its parameter with --sweep" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--route", "nobody"], "--route nobody: the daemon has no such route of two models; it has visits, chance, "),
        ([], "--config and --socket need --route NAME"),
        (["--route", "visits", "--train-prompts", "x"], "--train-prompts does not go with --socket"),
        (["--route", "visits", "--sweep", "visits"], "--sweep visits: expected ROUTE:PARAMETER=V,V,..."),
        (["--route", "visits", "--sweep", "no:n=1"], "--sweep no:n=1: no route 'no' over these two models"),
        (["--route", "visits", "--sweep", "visits:n=x"], "--sweep visits:n=x: could not convert string to float"),
        (["--route", "visits", "--sweep", "visits:n=0"], "visits: HTTP 400: "),
        (["--route", "visits", "--sweep", "visits:size=3"], "visits: HTTP 400: "),
    ],
)
def test_what_a_daemon_refuses(
    daemon: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    given = ["--output", str(tmp_path), "--problems", "1", "--socket", str(daemon.socket), *arguments]
    code, prefix = (1, "bench.frontier: ") if "HTTP" in message else (2, "bench.frontier: error: ")
    assert frontier.main(given) == code
    assert f"{prefix}{message}" in capsys.readouterr().err


def test_no_daemon(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--output", str(tmp_path), "--socket", str(tmp_path / "none.sock"), "--route", "demo"]
    assert frontier.main(given) == 1
    assert f"no answer from the daemon at {tmp_path / 'none.sock'}" in capsys.readouterr().err


def test_a_configuration_at_fault(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--output", str(tmp_path), "--config", str(config), "--route", "small"]
    assert frontier.main(given) == 2
    assert "--route small" in (said := capsys.readouterr().err)
    assert "there are: visits, chance, ask" in said
    assert frontier.main([*given[:2], "--config", str(tmp_path / "no.toml"), "--route", "x"]) == 2
    assert "no.toml" in capsys.readouterr().err
    given[-1] = "visits"
    assert frontier.main([*given, "--only", "every_n", "--sweep", "ask:threshold=1", "--sweep", "ask:threshold=1"]) == 2
    assert "--sweep: ask is swept already" in capsys.readouterr().err


def test_without_matplotlib(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert frontier.main(["--output", str(tmp_path / "out")]) == 1
    assert "bench.frontier: the plot needs matplotlib: pip install 'trouterd[bench]'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("rule", "text", "answer", "right"),
    [
        ("exact", "So the answer is 1,234.", "1234", True),
        ("exact", r"The answer is 3. No: \boxed{4}", "4", True),
        ("exact", "7 - 3 = 4\n#### 4", "4.0", True),
        ("exact", " Paris. ", "paris", True),
        ("exact", "It is Paris", "Paris", False),
        ("exact", "The answer is 12. 7", "7", False),
        ("last_number", "81 / 9 = 9, so it is 9.", "9", True),
        ("last_number", "81-9", "9", True),
        ("last_number", "minus -9", "-9", True),
        ("last_number", "$1,250.50 in all", "1250.5", True),
        ("last_number", "first 7, then 8", "7", False),
        ("last_number", "none", "7", False),
        ("contains", "It is PARIS, of course", "paris", True),
        ("contains", "New   York", "new york", True),
        ("contains", "Parisian", "Paris", False),
        ("contains", "12.5 or 13", "5", False),
        ("contains", "3.75", "3", False),
        ("contains", "it is 3.", "3", True),
        ("contains", "C++ (of course)", "C++", True),
    ],
)
def test_judges(rule: Rule, text: str, answer: str, right: bool) -> None:
    assert is_right(rule, text, answer) == right


@pytest.mark.parametrize("rule", RULES)
@given(number=st.integers(-(10**9), 10**9))
def test_every_judge_knows_the_number(rule: Rule, number: int) -> None:
    assert is_right(rule, f"The answer is {number}.", str(number))
    assert not is_right(rule, f"The answer is {number}.", str(number + 1))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "line 2: "),
        (b'{"prompt": "x"}', "line 2: Object missing required field `answer`"),
        (b'{"answer": 1}', "line 2: expected either 'prompt' or 'messages'"),
        (b'{"prompt": "x", "messages": [], "answer": 1}', "line 2: expected either 'prompt' or 'messages'"),
        (b'{"prompt": "x", "answer": " "}', "line 2: 'answer' is empty"),
        (b'{"prompt": "x", "answer": "seven"}', "line 2: 'answer' is 'seven', which is no number"),
        (b'{"prompt": 5, "answer": 1}', "line 2: Expected `str | null`, got `int` - at `$.prompt`"),
        (b'{"prompt": "\xff", "answer": 1}', "line 2: "),
    ],
)
def test_lines_that_cannot_be_used(tmp_path: Path, line: bytes, message: str) -> None:
    file = tmp_path / "set.jsonl"
    file.write_bytes(b'{"prompt": "x", "answer": 1}\n' + line + b"\n")
    with pytest.raises(FrontierError) as fault:
        file_task(file, 9, "last_number", 8)
    assert str(fault.value).startswith(f"--dataset {file}: {message}")
    assert len(file_task(file, 1, "last_number", 8).questions) == 1


def test_files_without_questions(tmp_path: Path) -> None:
    file = tmp_path / "set.jsonl"
    with pytest.raises(FrontierError, match="No such file"):
        file_task(file, 9, "exact", 8)
    file.write_text("\n \n")
    with pytest.raises(FrontierError, match="holds no question"):
        file_task(file, 9, "exact", 8)


def test_every_algorithm_is_swept_within_its_ranges() -> None:
    assert {sweep.algorithm for sweep in SWEEPS} == set(registry.names()) - {"none"}
    pair, task = demo_pair(), demo_task(3)
    assert len({question.answer for question in task.questions}) > 1
    for sweep in SWEEPS:
        definition = registry.load(sweep.algorithm)
        params = sweep.params("head.pt")
        registry.validate_params(definition, params, [pair.small, pair.large])
        for value in sweep.values:
            override = {sweep.parameter: list(value) if isinstance(value, tuple) else value}
            assert registry.check_overrides(definition, params, [pair.small, pair.large], override)


def test_sweeps_by_name() -> None:
    assert [sweep.name for sweep in named(["citer", "entropy"])] == ["citer", "entropy"]
    with pytest.raises(FrontierError, match="--only: no sweep is called 'entropi'; there are entropy, "):
        named(["entropi"])
    own = of_route("my:route:p=0.25,1", {"my:route": "./mine.py"})
    assert (own.name, own.algorithm, own.parameter, own.values) == ("my:route", "./mine.py", "p", (0.25, 1.0))


def test_values_of_a_sweep() -> None:
    sweep = Sweep(name="x", algorithm="citer", parameter="threshold", values=(0.1, 0.5, 0.9, 0.95), head="citer")
    assert sweep.thinned(9) == sweep
    assert sweep.thinned(3).values == (0.1, 0.9, 0.95)
    assert sweep.thinned(1).values == (0.1,)
    curve = {0.92: 0.2, 0.4: 0.1, 0.97: 0.5}
    assert sweep.refined(curve).values == (0.4, (0.4 + 0.92) / 2, 0.92)
    assert replace(sweep, most_share=1.0).refined({0.92: 0.2, 0.4: 0.1}).values == (0.4, 0.92, 0.95)
    falling = replace(sweep, values=sweep.values[::-1], most_share=1.0)
    assert falling.refined({0.92: 0.1, 0.4: 0.2}).values == (0.92, 0.4, 0.1)
    assert sweep.refined({0.5: 0.9}) == sweep


def sidecar(prompts: str = "demo:40") -> dict[str, Any]:
    """A checkpoint's report, as `trouterd train` writes it."""
    counts = {"train": 1, "validation": 1, "held_out": 1, "wanted": 0.5}
    curve = [{"threshold": t, "share": s, "recall": 1.0, "accuracy": 1.0} for t, s in ((0.9, 0.01), (0.6, 0.1))]
    routed = {"prompts": 1, "share": 0.1, "right": 1.0, "small_right": 0.0, "large_right": 1.0}
    report = {"labels": counts, "epochs": 1, "best_epoch": 1, "train_loss": 0.1, "validation_loss": 0.1}
    models = {"model": str(SMALL_DIRECTORY), "large_model": str(LARGE_DIRECTORY)}
    facts = {"algorithm": "r2r", "threshold": 0.6, "hidden_size": 8, **models}
    return {
        **facts,
        "target": "x",
        "seed": 0,
        "prompts": prompts,
        "report": {**report, "curve": curve, "routed": routed},
    }


def test_heads_of_an_earlier_run(tmp_path: Path) -> None:
    (r2r,) = named(["r2r"])
    head = tmp_path / "r2r.pt"
    head.touch()
    sidecar_path(head).write_bytes(msgspec.json.encode(sidecar()))
    assert trained_heads(demo_pair(), [r2r], Training(tmp_path, "demo:40", 128)) == {"r2r": head}
    assert [sweep.values for sweep in refined([r2r], {"r2r": head})] == [(0.9, 0.75, 0.6)]
    with pytest.raises(FrontierError, match=r"trouterd train r2r .*--prompts demo:1 .*: exit code 78"):
        trained_heads(demo_pair(), [r2r], Training(tmp_path, "demo:1", 128))
    assert given_heads([f"r2r={head}"], SWEEPS) == {"r2r": head}
    for text, message in (("r2r", "NAME=FILE"), (f"entropy={head}", "NAME=FILE"), ("citer=no.pt", "no file no.pt")):
        with pytest.raises(FrontierError, match=message):
            given_heads([text], SWEEPS)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_head_is_trained_and_beats_chance(tmp_path: Path) -> None:
    arguments = ["--output", str(tmp_path), "--work", str(tmp_path / "work"), "--problems", "40", "--points", "4"]
    assert frontier.main([*arguments, "--only", "r2r,bernoulli", "--train-prompts", "demo:120"]) == 0
    points = list(result(tmp_path).values())
    head = max((p for p in points if p["sweep"] == "r2r"), key=lambda p: p["accuracy"])
    chance = max((p for p in points if p["sweep"] == "bernoulli"), key=lambda p: p["accuracy"])
    assert head["accuracy"] > chance["accuracy"]
    assert head["large_share"] < chance["large_share"]


def point(accuracy: float, share: float, sweep: str = "x", *, reference: bool = False) -> Point:
    return Point(
        sweep=sweep,
        setting=f"t = {share:g}",
        value=share,
        reference=reference,
        accuracy=accuracy,
        large_share=share,
        handoffs_per_100=0.0,
        tokens_per_second=1.0,
        large_forwards=0.0,
        tokens_per_answer=1.0,
    )


COST: Callable[[Point], float] = lambda point: point.large_share  # noqa: E731


@given(st.lists(st.builds(point, st.sampled_from((0.0, 0.3, 0.5, 1.0)), st.sampled_from((0.0, 0.1, 0.2, 1.0)))))
def test_the_pareto_line(points: list[Point]) -> None:
    line = pareto(points, COST)
    assert all(a.large_share < b.large_share and a.accuracy < b.accuracy for a, b in zip(line, line[1:], strict=False))
    assert all(any(b.accuracy >= p.accuracy and b.large_share <= p.large_share for b in line) for p in points)
    assert all(one in points for one in line)


@pytest.mark.parametrize(
    ("questions", "said"),
    [
        (60, "One answer is 1.7 points: within 2 points of the large model is what lacks 1 answer against it."),
        (200, "One answer is 0.5 points: within 2 points of the large model is what lacks 4 answers against it."),
        (8, "One answer is 12 points: within 2 points of the large model is what lacks no answer against it."),
    ],
)
def test_so_many_questions_tell_no_finer(questions: int, said: str) -> None:
    assert resolution(questions) == said


def test_the_cheapest_point_that_is_good_enough() -> None:
    points = [point(0.97, 0.1), point(0.98, 0.3), point(1.0, 0.2), point(1.0, 0.5), point(0.5, 0.9, "never")]
    assert good_enough(points, 1.0) == {"x": points[2], "never": None}
    assert good_enough(points, 0.99) == {"x": points[0], "never": None}
    rows = points_table([*points, point(1.0, 1.0, LARGE, reference=True)]).splitlines()
    assert rows[2].startswith(f"| {LARGE} |")
    assert len(rows) == 2 + 6
