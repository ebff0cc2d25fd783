"""What a run had no time for, in one sentence instead of a list of keys."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

FEW = 3
"""Keys that are told themselves."""
Part = tuple[str, str]
"""A field of windows, and what it is in some of them."""
_FIELDS = ("workload", "batching", "system", "subject", "streams")
"""Told in this order, where one says as much as another."""
_PAIRS = (("system", "subject"), ("subject", "batching"), ("subject", "streams"), ("workload", "subject"))
"""What is told together, where nothing is missing as a whole."""


def summary(dropped: Collection[str], others: Collection[str], names: Mapping[str, str] | None = None) -> str:
    """Such as `63 dropped: all of eager, auto; std serving with citer, collm; 3 more`.

    Rule: what no window at all is left of is named first, a field's value alone before two together, and of these always the one
    that most of the others belong to.

    Args:
        dropped: keys (`Case.key`).
        others: keys of all other windows of the run, measured or not yet.
        names: of values, for readers.
    """
    if len(dropped) <= FEW:
        return f"{len(dropped)} dropped: {', '.join(dropped)}"
    if not others:
        return f"{len(dropped)} dropped: everything"
    rest = {key: fields_of(key) for key in dropped}
    kept = [fields_of(key) for key in others]
    single: list[Part] = []
    pairs: dict[Part, list[Part]] = {}
    while found := _widest(rest, kept):
        rest = {key: fields for key, fields in rest.items() if not _has(fields, found)}
        if len(found) == 1:
            single.append(found[0])
        else:
            pairs.setdefault(found[0], []).append(found[1])
    known = names or {}
    parts = [f"all of {', '.join(_told(part, known) for part in single)}"] if single else []
    parts += [
        f"{_told(one, known)} with {', '.join(_told(part, known) for part in with_)}" for one, with_ in pairs.items()
    ]
    if rest:
        parts.append(f"{len(rest)} more" if parts else "some of each kind")
    return f"{len(dropped)} dropped: {'; '.join(parts)}"


def fields_of(key: str) -> dict[str, str]:
    """Of a key; names of workloads may have slashes in them."""
    system, *workload, subject, batching, streams = key.split("/")
    values = ("/".join(workload), "" if batching == "-" else batching, system, subject, streams)
    return dict(zip(_FIELDS, values, strict=True))


def _widest(rest: Mapping[str, Mapping[str, str]], kept: Collection[Mapping[str, str]]) -> tuple[Part, ...]:
    """What most of the rest belongs to and none that is kept; () for nothing. Never a way to wait that is none."""
    for kinds in (tuple((field,) for field in _FIELDS), _PAIRS):
        counts: dict[tuple[Part, ...], int] = {}
        for parts in _each(rest.values(), kinds):
            counts[parts] = counts.get(parts, 0) + 1
        whole = {parts: count for parts, count in counts.items() if not any(_has(fields, parts) for fields in kept)}
        if whole:
            return max(whole, key=lambda parts: whole[parts])
    return ()


def _each(windows: Collection[Mapping[str, str]], kinds: Collection[tuple[str, ...]]) -> Iterator[tuple[Part, ...]]:
    for fields in windows:
        for kind in kinds:
            if all(fields[field] for field in kind):
                yield tuple((field, fields[field]) for field in kind)


def _has(fields: Mapping[str, str], parts: tuple[Part, ...]) -> bool:
    return all(fields[field] == value for field, value in parts)


def _told(part: Part, names: Mapping[str, str]) -> str:
    field, value = part
    return f"N = {value}" if field == "streams" else names.get(value, value)
