"""Every command line says what its options mean, and what they are unless given."""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Never

import pytest

ROOT = Path(__file__).parents[2]
COMMANDS = sorted(
    str(path.relative_to(ROOT).with_suffix("")).replace("/", ".")
    for package in ("bench", "trouterd")
    for path in (ROOT / package).rglob("*.py")
    if "ArgumentParser(" in path.read_text() and path.name not in ("child.py", "rank.py")
)
"""All but those of processes that only the daemon starts."""
IN_PLACE: dict[str, tuple[str, list[str]]] = {
    "bench.experiment_arguments": ("bench.throughput", ["--experiment", "a"]),
    "bench.step_arguments": ("bench.step", []),
}
"""Parsers that another module's command line reaches, and how."""
SAYS_DEFAULT = re.compile(r"\([^()]+\)|%\(default\)|\bdefault\b")


class _CaughtError(Exception):
    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


def parser_of(module: str, monkeypatch: pytest.MonkeyPatch) -> argparse.ArgumentParser:
    """The parser that a command makes, caught before it reads anything."""

    def catch(self: argparse.ArgumentParser, *_: Any) -> Never:
        raise _CaughtError(self)

    name, arguments = IN_PLACE.get(module, (module, []))
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", catch)
    monkeypatch.setattr("sys.argv", [name, *arguments])
    main: Callable[..., object] = importlib.import_module(name).main
    with pytest.raises(_CaughtError) as caught:
        main(arguments) if "arguments" in main.__code__.co_varnames[: main.__code__.co_argcount] else main()
    return caught.value.parser


def commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parser and those of its verbs."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for verb in action.choices.values():
                yield from commands(verb)


@pytest.mark.parametrize("module", COMMANDS)
def test_every_option_has_meaning_and_default(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for parser in commands(parser_of(module, monkeypatch)):
        assert parser.description, f"{parser.prog}: no description"
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                continue
            name = f"{parser.prog} {'/'.join(action.option_strings) or action.dest}"
            assert action.help, f"{name}: no help"
            if action.default not in (None, False, True, "", 0, [], (), argparse.SUPPRESS):
                assert SAYS_DEFAULT.search(action.help), f"{name}: its help does not say that it is {action.default}"
        parser.format_help()
