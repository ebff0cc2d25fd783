"""Loads the configuration: trouterd.toml, then `TROUTERD_SERVER__SOCKET=...` from the environment, then flags.

Relative paths in the file are relative to the file's folder; those in variables and flags to the working directory.
Unknown keys are errors. The result has every path absolute and `server.control` filled in.
"""

from __future__ import annotations

import copy
import importlib.resources
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from trouterd.config import Config, Section, Server
from trouterd.consistency import config_problems
from trouterd.keys import (
    Key,
    UnknownKeyError,
    carriage_problem,
    dotted,
    entries_of,
    keys_of,
    parse_text,
    resolve,
    suggestion,
    value_problem,
)

DEFAULT_FILE = "trouterd.toml"
BUILTIN = "builtin:"
BUILTIN_MODELS = ("small", "large")
_VARIABLE = re.compile(r"TROUTERD_(SERVER|SUPERVISION|RINGS|GPU|BATCHING|MODELS|ROUTES)_")
_PATH_KEYS = {
    ("server", "socket"),
    ("server", "control"),
    ("server", "api_key_file"),
    ("batching", "state"),
    ("models", "path"),
    ("models", "tokenizer"),
    ("routes", "algorithm"),
}
PATH_PARAMS = {"checkpoint"}
"""Parameters of algorithms that name files."""


class ConfigError(Exception):
    """The configuration cannot be used; `problems` holds one line each, naming source, key and what to do."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(self.problems))


@dataclass(frozen=True, slots=True)
class Source:
    """One place that values come from: a nested dict, its name for messages, and the folder of its relative paths."""

    name: str
    tree: dict[str, Any]
    folder: Path


def load(
    path: Path | None,
    environ: Mapping[str, str],
    overrides: Iterable[tuple[str, str]] = (),
    *,
    check: bool = True,
    given: Mapping[str, Any] | None = None,
) -> Config:
    """The effective configuration.

    Args:
        path: the TOML file; None for built-in defaults.
        environ: environment variables; those that name no section are not ours.
        overrides: dotted key and text of each flag, in order.
        check: also check that models and routes fit together and that files are there.
        given: what a command sets itself, in place of a file: a nested dict like the file's.

    Raises:
        ConfigError: with every problem found, not only the first.
    """
    sources = [_file_source(path)] if path else []
    if given is not None:
        sources.insert(0, Source("command line", dict(given), Path.cwd()))
    merged: dict[str, Any] = copy.deepcopy(sources[0].tree) if sources else {}
    unknown: list[str] = []
    for origin, pairs in (("environment", _variables(environ, merged)), ("flag", list(overrides))):
        source, wrong = _text_source(origin, pairs, merged)
        sources.append(source)
        unknown += wrong
        merge(merged, source.tree)
    problems = [problem for source in sources for problem in _tree_problems(Config, source.tree, (), source.name)]
    problems += unknown
    if problems:
        raise ConfigError(problems)
    home = path.resolve().parent if path else Path.cwd()
    merged = _absolute(Source("defaults", {"server": {"socket": Server().socket}}, home))
    for source in sources:
        merge(merged, _absolute(source))
    problems = _missing(Config, merged, ())
    if problems:
        raise ConfigError(_named(path, sources, problems))
    config = _with_control(msgspec.convert(merged, Config), home)
    if check and (problems := config_problems(config)):
        raise ConfigError(_named(path, sources, problems))
    return config


def set_value(config: Config, name: str, value: Any) -> tuple[Config, Any, Any]:
    """A new configuration with one live key changed.

    Args:
        config: the one in force; never modified.
        name: dotted key, for example `routes.demo.params.threshold`.
        value: the value, or its text.

    Returns:
        The new configuration, the old value (None: an algorithm parameter that was not set) and the new one.

    Raises:
        ConfigError: unknown, not live, wrong type or out of range; the message says which.
    """
    tree = msgspec.to_builtins(config)
    try:
        path, key = resolve(Config, name, tree)
    except UnknownKeyError as error:
        raise ConfigError([f"{name}: {error}"]) from error
    if isinstance(value, str):
        value = parse_text(key, value)
    if key is None:
        entries = value if isinstance(value, list) else [value]
        if not all(isinstance(entry, (int, float)) and not isinstance(entry, bool) for entry in entries):
            raise ConfigError([f"{name}: only numbers are live, alone or in a list, got {value!r}"])
        if problem := carriage_problem(value):
            raise ConfigError([f"{name}: {problem}"])
    elif not key.live:
        raise ConfigError([f"{name}: not live; the value in the file is used when the daemon is started again"])
    elif key.plain == dict[str, Any]:
        raise ConfigError([f"{name}: name one entry, such as {name}.threshold"])
    elif problem := value_problem(key, value):
        raise ConfigError([f"{name}: {problem}"])
    table = tree
    for part in path[:-1]:
        table = table[part]
    old = table.get(path[-1])
    table[path[-1]] = value
    return msgspec.convert(tree, Config), old, value


def differences(before: Config, after: Config) -> list[tuple[str, Any]]:
    """Dotted key and new value of everything that differs; a parameter that was removed has the value None."""
    old, new = _leaves(msgspec.to_builtins(before)), _leaves(msgspec.to_builtins(after))
    return [(name, new.get(name)) for name in old | new if name not in new or old.get(name) != new[name]]


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            leaves |= _leaves(value, f"{prefix}{name}.")
        else:
            leaves[prefix + name] = value
    return leaves


def live_keys(section: type[Section] = Config, prefix: str = "") -> list[str]:
    """The keys that may change while the daemon runs, with `*` for the name of a model or route."""
    found = []
    for key in keys_of(section).values():
        name = prefix + key.name
        if key.section is not None:
            found += live_keys(key.section, f"{name}.*." if key.named else f"{name}.")
        elif key.live:
            found.append(f"{name}.*" if key.plain == dict[str, Any] else name)
    return found


def _named(path: Path | None, sources: Iterable[Source], problems: Iterable[str]) -> list[str]:
    """The problems, each after the source that its key's value comes from; the file where no source gives it."""
    givers = {name: source.name for source in sources for name in _leaves(source.tree)}
    named = []
    for problem in problems:
        giver = givers.get(problem.partition(": ")[0], path)
        named.append(f"{giver}: {problem}" if giver else problem)
    return named


def _file_source(path: Path) -> Source:
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError([f"{path}: cannot read the configuration: {error.strerror}"]) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError([f"{path}: not TOML: {error}"]) from error
    return Source(str(path), tree, path.resolve().parent)


def _variables(environ: Mapping[str, str], tree: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Dotted key and text of every variable that names a section. Names of models and routes are matched without case."""
    pairs = []
    for variable, text in sorted(environ.items()):
        if not _VARIABLE.match(variable):
            continue
        parts = variable.removeprefix("TROUTERD_").lower().split("__")
        if len(parts) > 1 and parts[0] in ("models", "routes"):
            parts[1] = next((name for name in entries_of(tree, parts[0]) if _folded(name) == parts[1]), parts[1])
        if len(parts) == 1:
            raise ConfigError([f"{variable}: write sections with two underscores, such as TROUTERD_SERVER__SOCKET"])
        pairs.append((dotted(parts), text))
    return pairs


def _folded(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "_", name.lower())


def _text_source(origin: str, pairs: Iterable[tuple[str, str]], names: Mapping[str, Any]) -> tuple[Source, list[str]]:
    """Values given as text, as a tree, and one line for each key that names nothing."""
    tree: dict[str, Any] = {}
    problems = []
    for name, text in pairs:
        try:
            path, key = resolve(Config, name, names)
        except UnknownKeyError as error:
            problems.append(f"{origin}: {name}: {error}")
            continue
        table = tree
        for part in path[:-1]:
            table = table.setdefault(part, {})
        table[path[-1]] = parse_text(key, text)
    return Source(origin, tree, Path.cwd()), problems


def merge(into: dict[str, Any], tree: Mapping[str, Any]) -> None:
    """Lay a tree over another one, table by table; values are copied."""
    for name, value in tree.items():
        if isinstance(value, dict) and isinstance(into.get(name), dict):
            merge(into[name], value)
        else:
            into[name] = copy.deepcopy(value)


def _tree_problems(section: type[Section], tree: Any, path: tuple[str, ...], source: str) -> list[str]:
    """Unknown keys and values that do not fit, in one source."""
    if not isinstance(tree, dict):
        return [f"{source}: {dotted(path)}: expected a table, got {tree!r}"]
    problems = []
    keys = keys_of(section)
    for name, value in tree.items():
        here = (*path, name)
        key = keys.get(name)
        if key is None:
            problems.append(f"{source}: {dotted(here)}: unknown key{suggestion(name, keys)}")
        elif key.section is None:
            if problem := value_problem(key, value):
                problems.append(f"{source}: {dotted(here)}: {problem}")
        elif not key.named:
            problems += _tree_problems(key.section, value, here, source)
        elif isinstance(value, dict):
            for entry, table in value.items():
                problems += _tree_problems(key.section, table, (*here, entry), source)
        else:
            problems.append(f"{source}: {dotted(here)}: expected one table per name, got {value!r}")
    return problems


def _missing(section: type[Section], tree: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    """Required keys that no source gives."""
    problems = [
        f"{dotted((*path, key.name))}: required: {key.doc}"
        for key in keys_of(section).values()
        if key.required and key.name not in tree
    ]
    for name, inner, table in _tables(section, tree):
        problems += _missing(inner, table, (*path, *name))
    return problems


def _tables(
    section: type[Section], tree: Mapping[str, Any]
) -> Iterable[tuple[tuple[str, ...], type[Section], dict[str, Any]]]:
    """The tables directly under one table: path, section type and content."""
    for key in keys_of(section).values():
        if key.section is None or key.name not in tree:
            continue
        if key.named:
            for name, table in tree[key.name].items():
                yield (key.name, name), key.section, table
        else:
            yield (key.name,), key.section, tree[key.name]


def _absolute(source: Source) -> dict[str, Any]:
    """A source's tree with its relative paths resolved."""
    tree = copy.deepcopy(source.tree)
    for name, section, table in _tables(Config, tree):
        for key in keys_of(section).values():
            if (name[0], key.name) in _PATH_KEYS and key.name in table:
                table[key.name] = _absolute_path(key, table[key.name], source, name)
        _resolve_params(table.get("params"), source, name)
    return tree


def _resolve_params(params: Any, source: Source, table: tuple[str, ...]) -> None:
    """Make paths among an algorithm's parameters absolute."""
    if isinstance(params, dict):
        for name in PATH_PARAMS & params.keys():
            if isinstance(params[name], str) and params[name]:
                params[name] = _in_folder(params[name], source, (*table, "params", name))


def _absolute_path(key: Key, value: str, source: Source, table: tuple[str, ...]) -> str:
    if not value:
        return value
    if key.name == "algorithm" and not (value.endswith(".py") or "/" in value):
        return value  # the name of a built-in or installed algorithm
    if value.startswith(BUILTIN):
        name = value.removeprefix(BUILTIN)
        if name in BUILTIN_MODELS:
            return str(importlib.resources.files("trouterd").joinpath("demo", name))
        return value
    return _in_folder(value, source, (*table, key.name))


def _in_folder(value: str, source: Source, key: tuple[str, ...]) -> str:
    """A path with its `~` resolved; a relative one is relative to the source's folder."""
    try:
        return str(source.folder / Path(value).expanduser())
    except RuntimeError as error:  # what pathlib makes of ~NAME without such a user
        raise ConfigError([f"{source.name}: {dotted(key)}: no such home folder: {value}"]) from error


def _with_control(config: Config, home: Path) -> Config:
    """Fill in server.control: beside the API socket, or beside the configuration when there is no such socket."""
    server = config.server
    if server.control:
        return config
    control = Path(server.socket).with_suffix(".ctl") if server.socket else home / "trouterd.ctl"
    return msgspec.structs.replace(config, server=msgspec.structs.replace(server, control=str(control)))
