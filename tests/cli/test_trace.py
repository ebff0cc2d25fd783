"""trouterctl trace: what it writes and prints of what a daemon has recorded, and how it fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from trouterd import ctl
from trouterd.control import Reply
from trouterd.tracing import command
from trouterd.tracing.chrome import LOOP, MODEL, SENT, chrome
from trouterd.tracing.events import Event, Handoff, Idle, Mark, Queues, State, Step, Summary, Work


def step(begin: float, end: float, **changes: Any) -> Step:
    fields = {"launched": begin, "begin": begin, "end": end, "device": end - begin, "requests": 4, "rows": 40}
    fields |= {"prefill": 30, "arrived": 1, "alive": 4, "leaving": 2, "reason": "linger", "threshold": 3}
    return Step(**(fields | {"ready": 2, "queued": 0} | changes))


SMALL: list[Event] = [
    Idle(State.HELD, 10.0, 10.5),
    Work("launch", 10.5, 10.625),
    Queues(10.5, 4, 1, 2),
    step(10.5, 11.0, launched=10.25),
    Mark("admitted", 10.75, 3),
    Handoff(7, 1, 10.25, 10.5, 10.5),
    Handoff(8, 1, 9.0, 10.5, 10.5),
    Handoff(9, 2, 10.25, 10.5, 10.5),
]
LARGE: list[Event] = [step(10.0, 12.0, prefill=0)]


def summary(**changes: Any) -> Summary:
    spent = {"step": 2.5, "loop": 0.5, "held": 0.5, "no_room": 0.0, "nothing_ready": 0.5}
    fields: dict[str, Any] = {"begin": 10.0, "end": 14.0, "steps": 8, "tokens": 40, "alive": 20, "spent": spent}
    fields |= {"busy": 2.0, "prefill": 0.5, "handoffs": 6, "latencies": (0.001, 0.0025), "events": 8, "dropped": 0}
    return Summary(**(fields | changes))


def test_every_event_has_its_place() -> None:
    rows = list(chrome({"small": SMALL, "large": LARGE}, ["small", "large", "third"], 10.0))
    names = {(row["pid"], row["args"]["name"]) for row in rows if row["ph"] == "M" and row["name"] == "process_name"}
    assert names == {(1, "small"), (2, "large")}
    slices = [(r["pid"], r["tid"], r["name"], r["ts"], r["dur"]) for r in rows if r["ph"] == "X"]
    assert slices == [
        (1, MODEL, "held by delayed batching or turns", 0, 5e5),
        (1, LOOP, "launch", 5e5, 125e3),
        (1, MODEL, "prefill step", 5e5, 5e5),
        (2, SENT, "to small", 25e4, 0.5),
        (2, MODEL, "step", 0, 2e6),
    ]
    assert next(row for row in rows if row["name"] == "prefill step")["args"] == {
        "requests": 4,
        "rows": 40,
        "prefill_rows": 30,
        "arrived_by_handoff": 1,
        "alive": 4,
        "handed_over": 2,
        "device_seconds": 0.5,
        "launched_by": "linger",
        "B": 3,
        "ready": 2,
        "queued_behind": 0,
        "launched_before_us": 25e4,
    }
    counter, mark = (next(row for row in rows if row["ph"] == kind) for kind in "Ci")
    assert counter["args"] == {"running": 4, "away": 1, "waiting": 2}
    assert (mark["name"], mark["args"]) == ("admitted", {"requests": 3})
    # Not of hand-offs from before the trace, or from a model that is not in it.
    arrows = [(row["ph"], row["id"], row["pid"], row["tid"], row["ts"]) for row in rows if row["ph"] in "sf"]
    assert arrows == [("s", 1, 2, SENT, 25e4), ("f", 1, 1, MODEL, 5e5)]


class Daemon:
    """Answers the calls of one trace."""

    def __init__(self, answers: dict[str, Any], events: dict[str, list[Any]] | None = None) -> None:
        self.answers, self.events = answers, {name: iter(parts) for name, parts in (events or {}).items()}
        self.left = iter([1e-3, 0.0])
        self.calls: list[str] = []

    def reply(self, verb: str, args: dict[str, Any]) -> Any:
        self.calls.append(verb)
        match verb:
            case "trace":
                return {"trace": 3, "models": dict.fromkeys(self.answers), "workers": ["small", "large", "third"]}
            case "trace-left":
                return next(self.left)
            case "trace-stop":
                return msgspec.to_builtins(self.answers)
            case "trace-read":
                part = next(self.events[args["model"]])
                if isinstance(part, str):
                    return {"error": part}
                return {"events": msgspec.msgpack.encode(part), "left": self.events[args["model"]].__length_hint__()}
        return None


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Puts a daemon at the other end of every connection."""

    class NoLink:
        def __enter__(self) -> NoLink:
            return self

        def __exit__(self, *error: object) -> None:
            pass

    monkeypatch.setattr(ctl, "_control_path", lambda flag: tmp_path / "d.ctl")
    monkeypatch.setattr(ctl, "_connect", lambda path: NoLink())

    def put(daemon: Any) -> None:
        monkeypatch.setattr(ctl, "_ask", lambda link, verb, args: Reply(id=1, result=daemon.reply(verb, args)))

    return put


def test_trace_writes_a_timeline_and_prints_shares(
    talk: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon = Daemon(
        {"small": summary(dropped=17), "large": {"error": "large died"}}, {"small": [SMALL[:5], SMALL[5:]], "large": []}
    )
    talk(daemon)
    file = tmp_path / "t.json"
    assert ctl.main(["trace", "--seconds", "0.5", "--output", str(file)]) == ctl.EXIT_OK
    assert daemon.calls == ["trace", "trace-left", "trace-left", "trace-stop", "trace-read", "trace-read", "trace-end"]
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    shares = ["50.0%", "12.5%", "12.5%", "12.5%", "0.0%", "12.5%"]
    assert lines[1] == ["small", "2.0", "2.5", "10.0", *shares, "25.0%", "1.5", "1.00", "2.50"]
    assert lines[2] == ["large", "large", "died"]
    assert lines[3] == ["small:", "the", "timeline", "lacks", "the", "first", "17", "events"]
    written = json.loads(file.read_text())
    assert written["traceEvents"] == list(chrome({"small": SMALL}, ["small", "large", "third"], 10.0))
    assert sum(written["otherData"]["models"]["small"]["shares"].values()) == 1


def test_a_worker_that_dies_costs_its_own_events_alone(
    talk: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = {"small": [SMALL[:5], "small died", SMALL[5:]], "large": [LARGE], "third": ["third is down"]}
    talk(Daemon({"small": summary(), "large": summary(begin=10.5), "third": summary()}, events))
    file = tmp_path / "t.json"
    assert ctl.main(["trace", "--output", str(file)]) == ctl.EXIT_OK
    assert capsys.readouterr().out.splitlines()[4:] == [
        "small: the timeline lacks what had not been read: small died",
        "large: its part begins 0.50 s late",
        "third: the timeline lacks what had not been read: third is down",
        f"timeline: {file}",
    ]
    written = json.loads(file.read_text())
    read = {"small": SMALL[:5], "large": LARGE, "third": []}
    assert written["traceEvents"] == list(chrome(read, ["small", "large", "third"], 10.0))
    assert [model["unread"] for model in written["otherData"]["models"].values()] == ["small died", "", "third is down"]


def test_summary_reads_no_events(talk: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    daemon = Daemon({"small": summary()})
    talk(daemon)
    file = tmp_path / "t.json"
    assert ctl.main(["trace", "--summary", "--json", "--output", str(file)]) == ctl.EXIT_OK
    assert daemon.calls == ["trace", "trace-left", "trace-left", "trace-stop", "trace-end"]
    assert not file.exists()
    shown = json.loads(capsys.readouterr().out)["small"]
    assert (shown["steps_per_second"], shown["batch"], shown["handoff_ms"]) == (2, 2.5, {"p50": 1, "p99": 2.5})


def test_a_summary_says_nothing_of_a_timeline(talk: Any, capsys: pytest.CaptureFixture[str]) -> None:
    talk(Daemon({"small": summary(dropped=17)}))
    assert ctl.main(["trace", "--summary"]) == ctl.EXIT_OK
    assert "timeline" not in capsys.readouterr().out


def test_an_interrupt_ends_the_recording_and_keeps_it(
    talk: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon = Daemon({"small": summary()}, {"small": [SMALL]})
    talk(daemon)

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command.time, "sleep", interrupted)
    file = tmp_path / "t.json"
    assert ctl.main(["trace", "--output", str(file)]) == ctl.EXIT_OK
    assert daemon.calls == ["trace", "trace-left", "trace-stop", "trace-read", "trace-end"]
    assert "ends early" in capsys.readouterr().err
    assert json.loads(file.read_text())["traceEvents"]


def test_a_file_that_cannot_be_written_is_said_before_the_wait(
    talk: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon = Daemon({"small": summary()})
    talk(daemon)
    file = tmp_path / "nowhere" / "t.json"
    assert ctl.main(["trace", "--output", str(file)]) == ctl.EXIT_FAILURE
    assert daemon.calls == ["trace", "trace-end"]
    assert capsys.readouterr().err == f"trouterctl: {file}: No such file or directory\n"


def test_nobody_recorded(talk: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    talk(Daemon({"small": {"error": "small is down"}}))
    assert ctl.main(["trace", "--output", str(tmp_path / "t.json")]) == ctl.EXIT_FAILURE
    assert "small is down" in capsys.readouterr().out


@pytest.mark.parametrize("seconds", ["0", "0.01", "61", "nan", "soon"])
def test_seconds_are_checked(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        ctl.main(["trace", "--seconds", seconds])
    assert caught.value.code == ctl.EXIT_USAGE
    assert "expected seconds from 0.1 to 60" in capsys.readouterr().err


def test_a_quiet_model_has_shares_of_nothing() -> None:
    quiet = summary(steps=0, alive=0, handoffs=0, busy=0.0, prefill=0.0, latencies=(0.0, 0.0))
    assert sum(quiet.shares.values()) == pytest.approx(1)
    assert sum(summary(end=10.0).shares.values()) == 0
