"""The keys of the configuration tree as data: path, type, documentation, range, default and whether they are live."""

from __future__ import annotations

import difflib
import functools
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from trouterd.config import Section

_MOST_SHOWN = 120
"""Characters of a value in a message."""


@dataclass(frozen=True, slots=True)
class Key:
    """One field of a section."""

    name: str
    type: Any
    """As annotated, ranges included: what `msgspec.convert` checks a value against."""
    section: type[Section] | None
    """The section that the field holds, or of which it holds one per name."""
    named: bool
    """True: a table of sections by name (models, routes)."""
    doc: str
    live: bool
    range: str
    default: Any
    required: bool

    @property
    def plain(self) -> Any:
        """The type without its range."""
        return get_args(self.type)[0] if get_origin(self.type) is Annotated else self.type

    @property
    def choices(self) -> tuple[str, ...]:
        """The values that a key with a fixed set of words takes."""
        return get_args(self.plain) if get_origin(self.plain) is Literal else ()


def _meta(annotated: Any) -> msgspec.Meta:
    if get_origin(annotated) is Annotated:
        for extra in get_args(annotated)[1:]:
            if isinstance(extra, msgspec.Meta):
                return extra
    return msgspec.Meta()


def _range(meta: msgspec.Meta, choices: tuple[str, ...]) -> str:
    bounds = ((">=", meta.ge), (">", meta.gt), ("<=", meta.le), ("<", meta.lt))
    words = [f"{sign} {bound}" for sign, bound in bounds if bound is not None]
    return ", ".join(words) or " | ".join(choices)


def _section_of(plain: Any) -> tuple[type[Section] | None, bool]:
    """The section type inside a field's type, and whether it is a table of them by name."""
    if isinstance(plain, type) and issubclass(plain, Section):
        return plain, False
    if get_origin(plain) is dict:
        value = get_args(plain)[1]
        if isinstance(value, type) and issubclass(value, Section):
            return value, True
    return None, False


@functools.cache
def keys_of(section: type[Section]) -> dict[str, Key]:
    """The fields of a section by name, in the order of their definition."""
    hints = get_type_hints(section, include_extras=True)
    keys = {}
    for field in msgspec.structs.fields(section):
        annotated = hints[field.name]
        meta = _meta(annotated)
        key = Key(field.name, annotated, None, False, "", False, "", None, field.required)
        inner, named = _section_of(key.plain)
        default = field.default_factory() if field.default_factory is not msgspec.NODEFAULT else field.default
        keys[field.name] = Key(
            name=field.name,
            type=annotated,
            section=inner,
            named=named,
            doc=meta.description or (inner.__doc__ or "" if inner else ""),
            live=bool((meta.extra or {}).get("live")),
            range=_range(meta, key.choices),
            default=None if field.required else default,
            required=field.required,
        )
    return keys


def close_match(word: str, known: Iterable[str]) -> str:
    """'; did you mean X?' where a known word is near, else ''."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean '{close[0]}'?" if close else ""


def suggestion(word: str, known: Iterable[str]) -> str:
    """'; did you mean X?' or the list of what is known."""
    names = list(known)
    return close_match(word, names) or (f"; known: {', '.join(names)}" if names else "")


def dotted(path: Iterable[str]) -> str:
    """A key's path as written in messages, flags and by trouterctl; a part that does not fit into a line is quoted."""
    return ".".join(part if part and part.isprintable() else repr(part) for part in path)


def value_problem(key: Key, value: Any) -> str:
    """Why `value` does not fit the key; '' if it does."""
    if key.choices and value not in key.choices:
        return f"expected one of {', '.join(key.choices)}, got {_shown(value)}" + (
            close_match(value, key.choices) if isinstance(value, str) else ""
        )
    try:
        msgspec.convert(value, key.type)
    except msgspec.ValidationError as error:
        reason = str(error).replace("`", "").partition(" - at ")[0]
        return f"{reason[0].lower()}{reason[1:].split(', got')[0]}, got {_shown(value)}"
    return carriage_problem(value)


def _shown(value: Any) -> str:
    """A value in a message: a list of thousands does not fit there."""
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def carriage_problem(value: Any) -> str:
    """Why a value cannot be carried to the other processes; '' if it can."""
    try:
        msgspec.msgpack.encode(value)
    except OverflowError:
        return f"a whole number of more than 64 bits: {value!r}"
    except UnicodeEncodeError:
        return f"not UTF-8: {value!r}"
    return ""


def parse_text(key: Key | None, text: str) -> Any:
    """A value given as text (environment, flag, trouterctl): words stay words, everything else is read as TOML.

    `key` is None for an entry of a free table (a route's params).
    """
    if key is not None and (key.plain is str or key.choices):
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        return text


def entries_of(tree: Mapping[str, Any], table: str) -> Mapping[str, Any]:
    """What a table of an unchecked configuration holds; nothing where it is absent or no table."""
    entries = tree.get(table)
    return entries if isinstance(entries, dict) else {}


class UnknownKeyError(Exception):
    """A dotted key that names nothing; the message says what was meant."""


def resolve(root: type[Section], parts: str, names: Mapping[str, Any]) -> tuple[tuple[str, ...], Key | None]:
    """The path and the key of a dotted name such as `routes.demo.params.threshold`.

    Args:
        root: the section type that `parts` starts in.
        parts: the dotted name. Names of models and routes may hold dots.
        names: the configuration as nested dicts, which says what models and routes there are.

    Returns:
        The path, and the key that it names; None for an entry of a free table.

    Raises:
        UnknownKeyError: no such key; a table, not a key; a model or route that is not there.
    """
    if not parts:
        raise UnknownKeyError(f"is a table; name one of its keys: {', '.join(keys_of(root))}")
    head, _, rest = parts.partition(".")
    key = keys_of(root).get(head)
    if key is None:
        raise UnknownKeyError(f"unknown key '{head}'{suggestion(head, keys_of(root))}")
    if key.section is None:
        if key.plain == dict[str, Any] and rest:
            return (head, rest), None
        if rest:
            raise UnknownKeyError(f"'{head}' is a value, not a table")
        return (head,), key
    if not key.named:
        inner, found = resolve(key.section, rest, entries_of(names, head))
        return (head, *inner), found
    entries = entries_of(names, head)
    owner = next((name for name in sorted(entries, key=len, reverse=True) if rest.startswith(name + ".")), None)
    if owner is None:
        raise UnknownKeyError(f"no entry of '{head}' in '{rest}'{suggestion(rest.partition('.')[0], entries)}")
    inner, found = resolve(key.section, rest[len(owner) + 1 :], entries[owner])
    return (head, owner, *inner), found
