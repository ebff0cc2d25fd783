"""The file of an experiment: written anew after every window, so that a run that is cut off keeps what it has."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

import msgspec

from bench.experiment_case import Case, Record

_SUFFIX = ".json"


@dataclass(slots=True)
class Result:
    """Everything that one command has found of one experiment."""

    head: dict[str, Any]
    """Experiment, models, placement, hardware, versions, commit, command."""
    records: list[Record] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    """Keys of windows that the budget had no room for."""
    failures: list[tuple[str, str]] = field(default_factory=list)
    """Key and reason."""
    complete: bool = False
    points: list[dict[str, Any]] = field(default_factory=list)
    """Experiment h: of the frontier."""

    @property
    def command(self) -> tuple[object, object] | None:
        """Equal for results of one command; None: its file is from before it was told."""
        nonce = self.head.get("nonce")
        return None if nonce is None else (nonce, self.head["started"])

    def save(self, path: Path) -> None:
        """Whole or not at all. Raises ResultError."""
        scratch = path.with_name(path.name + ".new")
        try:
            scratch.write_text(json.dumps(asdict(self), indent=1))
            scratch.replace(path)
        except OSError as error:
            with suppress(OSError):
                scratch.unlink(missing_ok=True)
            raise ResultError(f"cannot write {path}: {error.strerror}") from error


@dataclass(slots=True)
class ResultFile:
    """A result, and where it is written."""

    result: Result
    path: Path

    @property
    def experiment(self) -> str:
        """Its letter."""
        return str(self.result.head["experiment"])

    def concerns(self, case: Case) -> bool:
        """Whether the window is one of its experiment's."""
        return self.experiment in case.experiments

    def has(self, key: str) -> bool:
        """Whether a window was measured."""
        return any(record.case.key == key for record in self.result.records)

    def save(self) -> None:
        """Whole or not at all. Raises ResultError."""
        self.result.save(self.path)


def new_file(folder: Path, experiment: str, pair: str, placement: str) -> Path:
    """A name that is free: `a-Qwen3-0.6B+Qwen3-32B-shared.json`, or with a number behind it. Raises ResultError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ResultError(f"--output: cannot make the folder {folder}: {error.strerror}") from error
    stem = f"{experiment}-{pair}-{placement}"
    path, number = folder / f"{stem}{_SUFFIX}", 1
    while not _taken(path):
        number += 1
        path = folder / f"{stem}-{number}{_SUFFIX}"
    return path


def _taken(path: Path) -> bool:
    """Whether the name is this command's from now on: another one may begin in the same folder. Raises ResultError."""
    try:
        with path.open("x") as file:
            file.write("{}")  # no result yet
    except FileExistsError:
        return False
    except OSError as error:
        raise ResultError(f"cannot write {path}: {error.strerror}") from error
    return True


def now() -> str:
    """For the head."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


class ResultError(Exception):
    """A file that is no result, or that cannot be written; the message names it."""


def read_results(folder: Path) -> list[Result]:
    """All results in a folder and below, the oldest first.

    Raises:
        ResultError: there is none, or a file is none.
    """
    found = []
    for path in sorted(folder.rglob(f"*{_SUFFIX}")):
        try:
            content = json.loads(path.read_text())
            if not isinstance(content, dict) or "records" not in content or "experiment" not in content.get("head", {}):
                continue  # another bench's result may lie beside
            found.append(_result(content))
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise ResultError(f"{path}: not a result of an experiment: {error}") from error
    if not found:
        raise ResultError(f"{folder}: holds no result of an experiment")
    return sorted(found, key=lambda result: str(result.head.get("started", "")))


class _Head(TypedDict):
    """What reports read of a head; files of before lack some of it."""

    experiment: Literal["a", "b", "c", "d", "e", "f", "g", "h"]
    hardware: str
    versions: dict[str, str]
    commit: str
    command: str
    pair: str
    placement: str
    devices: list[str]
    names: dict[str, str]
    started: NotRequired[str]
    nonce: NotRequired[int]
    settings: NotRequired[dict[str, Any]]
    contention: NotRequired[list[float]]
    note: NotRequired[str]


class _Record(TypedDict):
    case: dict[str, Any]
    window: dict[str, Any]
    facts: dict[str, Any]


class _File(TypedDict):
    head: _Head
    records: list[_Record]
    dropped: list[str]
    failures: list[tuple[str, str]]
    complete: bool
    points: list[dict[str, Any]]


def _result(content: Mapping[str, Any]) -> Result:
    """Raises ValueError, TypeError: it is none."""
    file = msgspec.convert(content, _File)
    if file["head"]["experiment"] == "h" and not file["points"]:
        raise ValueError("experiment h without a point")
    records = [Record(_case(record["case"]), record["window"], record["facts"]) for record in file["records"]]
    return Result(content["head"], records, file["dropped"], file["failures"], file["complete"], file["points"])


def _case(content: Mapping[str, Any]) -> Case:
    """JSON has no tuples."""
    return msgspec.convert(content, Case)
