"""Writes a configuration as TOML with each key's documentation: `trouterd config`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from trouterd.config import Config, Section
from trouterd.keys import Key, keys_of

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def dump(config: Config) -> str:
    """The effective file: loading it gives `config` again."""
    lines = ["# Effective configuration of trouterd. 'live' keys can be changed with: trouterctl set KEY VALUE", ""]
    lines += _section_lines(config, ())
    return "\n".join(lines) + "\n"


def _section_lines(section: Section, path: tuple[str, ...]) -> list[str]:
    lines = []
    if path:
        lines.append(f"[{'.'.join(_key_text(part) for part in path)}]")
    keys = keys_of(type(section))
    for key in keys.values():
        if key.section is None:
            lines += [
                f"# {key.doc}",
                f"# {_facts(key)}",
                f"{key.name} = {_value_text(key, getattr(section, key.name))}",
            ]
    if path:
        lines.append("")
    for key in keys.values():
        value = getattr(section, key.name)
        if key.named:
            for name, entry in value.items():
                lines += _section_lines(entry, (*path, key.name, name))
            if not value and key.section is not None:
                lines += _outline(key.section, (*path, key.name, "NAME"))
        elif key.section is not None:
            lines += _section_lines(value, (*path, key.name))
    return lines


def _outline(section: type[Section], path: tuple[str, ...]) -> list[str]:
    """The keys of a table of which there is none, all as comments."""
    lines = [f"# [{'.'.join(path)}]"]
    for key in keys_of(section).values():
        value = "..." if key.required else _value_text(key, key.default)
        lines += [f"# # {key.doc}", f"# # {_facts(key)}", f"# {key.name} = {value}"]
    return [*lines, ""]


def _facts(key: Key) -> str:
    facts = ["required" if key.required else f"default: {_value_text(key, key.default)}"]
    if key.range:
        facts.append(key.range)
    facts.append("live" if key.live else "fixed at start")
    return "; ".join(facts)


def _value_text(key: Key, value: Any) -> str:
    return f"0o{value:o}" if key.name.endswith("_mode") else toml_value(value)


def _key_text(name: str) -> str:
    return name if _BARE.fullmatch(name) else toml_value(name)


def toml_value(value: Any) -> str:
    """One value as TOML; tables are written inline."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        # JSON's escapes are all TOML's too; DEL is the one character that only TOML wants escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    if isinstance(value, Mapping):
        pairs = ", ".join(f"{_key_text(name)} = {toml_value(item)}" for name, item in value.items())
        return f"{{ {pairs} }}" if pairs else "{}"
    return str(value)  # TOML's dates and times, whose ISO text is their TOML text
