"""Finds algorithms by name or path and checks their parameters.

Three sources: a module of this package whose file defines `ALGORITHM` (named as the algorithm), an entry point of the group
`trouterd.algorithms` (its value is a `Definition`, or a module that defines `ALGORITHM`), or the path of a Python file.
A file or entry point is the user's code and runs with the rights of the process that loads it.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import math
import pkgutil
import re
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
from msgspec.inspect import (
    EnumType,
    FloatType,
    IntType,
    LiteralType,
    Metadata,
    Type,
    UnionType,
    VarTupleType,
    type_info,
)
from msgspec.structs import FieldInfo

import algorithms
from algorithms.base import MOST_MODELS, Algorithm, Definition
from algorithms.drafting import Drafter, Verifier

GROUP = "trouterd.algorithms"
"""Entry point group of installed algorithms."""

_ATTRIBUTE = "ALGORITHM"
_LARGEST = (2 - 2**-23) * 2.0**127
"""Of float32, in which rows carry numeric parameters: a larger one would fail the step of all its batch mates."""
_DEFINES = re.compile(rf"^{_ATTRIBUTE}\b", re.MULTILINE)


class AlgorithmError(Exception):
    """An algorithm that cannot be used, or a parameter that it does not take; the message says what to change.

    `key` names the parameter at fault, '' where it is the algorithm itself.
    """

    def __init__(self, message: str, key: str = "") -> None:
        super().__init__(message)
        self.key = key


def names() -> tuple[str, ...]:
    """Every algorithm that can be loaded by name, sorted; imports none of them."""
    return tuple(sorted({*_builtin_names(), *(point.name for point in entry_points(group=GROUP))}))


def is_builtin(name: str) -> bool:
    """Whether this algorithm is one of our own, which does nothing but read its files when a side is built."""
    return name in _builtin_names()


def load(name_or_path: str, folder: Path | None = None) -> Definition:
    """The definition of an algorithm.

    Args:
        name_or_path: a name, or the path of a Python file (it ends in .py or contains a slash).
        folder: what a relative path is relative to: the configuration file's folder; default: the working directory.

    Raises:
        AlgorithmError: nothing of that name, or a file or entry point that is no algorithm.
    """
    if name_or_path.endswith(".py") or "/" in name_or_path:
        return _load_file((folder or Path.cwd()) / Path(name_or_path).expanduser())
    if name_or_path in _builtin_names():
        module = importlib.import_module(f"{algorithms.__name__}.{name_or_path}")
        return _checked(getattr(module, _ATTRIBUTE), f"built-in algorithm {name_or_path!r}")
    points = list(entry_points(group=GROUP, name=name_or_path))
    if len(points) > 1:
        raise AlgorithmError(
            f"algorithm {name_or_path!r} is provided by several packages: {', '.join(map(_provider, points))};"
            " uninstall all but one"
        )
    if points:
        return _load_entry_point(points[0])
    raise AlgorithmError(
        f"unknown algorithm {name_or_path!r}{_suggest(name_or_path, names())}; known: {', '.join(names())}."
        " A file of your own is given by its path, for example './my_rule.py'"
    )


def validate_params(definition: Definition, params: Mapping[str, Any], models: Sequence[str]) -> msgspec.Struct:
    """The parameter struct of a route, checked against the algorithm's ranges and the route's models.

    Raises:
        AlgorithmError: a missing, unknown or out-of-range parameter, or a number of models that the algorithm does not take.
    """
    _check_models(definition, models)
    fields = _fields(definition.params)
    for key in params:
        if key not in fields:
            raise _unknown_param(definition, key)
    for key, declared in fields.items():
        if key in params:
            _converted(definition, declared, params[key])
        elif declared.required:
            purpose = _description(declared)
            raise AlgorithmError(f"algorithm {definition.name!r} needs the parameter {key!r}{purpose}", key)
    try:
        struct = msgspec.convert(dict(params), definition.params)
        if definition.check is not None:
            definition.check(struct, tuple(models))
    except ValueError as error:
        key = next((key for key in fields if re.match(rf"{re.escape(key)}\b", str(error))), "")
        raise AlgorithmError(f"algorithm {definition.name!r}, {error}", key) from error
    except (Exception, SystemExit) as error:  # code of users: a check that fails is no reason for the worker to
        raise AlgorithmError(f"algorithm {definition.name!r}, check() failed: {_told(error)}") from error
    return struct


def numeric_params(params: msgspec.Struct) -> dict[str, float]:
    """The parameters that become per-row tensors: fields declared int or float whose value is a number, and each entry i of a
    tuple of numbers as `name.i`."""
    numbers: dict[str, float] = {}
    for name, declared in _fields(type(params)).items():
        value = getattr(params, declared.name)
        if _number(declared) and isinstance(value, int | float):
            numbers[name] = float(value)
        elif _number(declared) and isinstance(value, tuple):
            numbers |= {f"{name}.{place}": float(entry) for place, entry in enumerate(value)}
    return numbers


def check_overrides(
    definition: Definition, configured: Mapping[str, Any], models: Sequence[str], overrides: Mapping[str, object]
) -> dict[str, float]:
    """Numeric parameters as given by a request, range-checked, in the form of `numeric_params`.

    Args:
        definition: the algorithm.
        configured: all parameters of the route, which those of the request are laid over.
        models: the route's models.
        overrides: numbers, or a list of numbers for a tuple.

    Raises:
        AlgorithmError: not a parameter, not a numeric one, out of range, or not together with the others.
    """
    values = {name: _override(definition, name, value) for name, value in overrides.items()}
    numbers = numeric_params(validate_params(definition, {**configured, **values}, models))
    for name, value in values.items():
        if isinstance(value, tuple):
            _check_length(definition, name, len(value), validate_params(definition, configured, models))
    return {name: value for name, value in numbers.items() if name.partition(".")[0] in values}


def _check_length(definition: Definition, name: str, given: int, configured: msgspec.Struct) -> None:
    """Each entry is a parameter of its own, and a route's parameters are the same for all of its requests."""
    count = sum(number.startswith(f"{name}.") for number in numeric_params(configured))
    if given != count:
        raise AlgorithmError(
            f"algorithm {definition.name!r}, parameter {name!r}: needs {count} numbers, as configured, not {given}",
            name,
        )


def _override(definition: Definition, name: str, value: object) -> Any:
    fields = _fields(definition.params)
    if name not in fields:
        raise _unknown_param(definition, name)
    number = _number(fields[name])
    if number is None:
        raise AlgorithmError(
            f"algorithm {definition.name!r}, parameter {name!r}: is not a number; only the configuration file sets it",
            name,
        )
    if number is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    converted = _converted(definition, fields[name], value)
    if isinstance(converted, bool) or not isinstance(converted, int | float | tuple):
        raise AlgorithmError(f"algorithm {definition.name!r}, parameter {name!r}: must be a number", name)
    return converted


def _builtin_names() -> tuple[str, ...]:
    found = []
    for info in pkgutil.iter_modules(algorithms.__path__):
        spec = info.module_finder.find_spec(info.name, None)
        if spec is not None and spec.origin is not None and _DEFINES.search(Path(spec.origin).read_text("utf-8")):
            found.append(info.name)
    return tuple(found)


def _load_entry_point(point: EntryPoint) -> Definition:
    what = f"entry point {point.name!r} ({point.value}) of {_provider(point)}"
    try:
        loaded = point.load()
    except (Exception, SystemExit) as error:  # code of users, which may be a script that ends
        raise AlgorithmError(f"{what} cannot be loaded: {_told(error)}") from error
    return _exposed(loaded, what) if isinstance(loaded, ModuleType) else _checked(loaded, what)


def _provider(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "an unnamed package"


def _load_file(path: Path) -> Definition:
    path = path.resolve()
    if not path.is_file():
        raise AlgorithmError(f"{path}: no such file")
    # A name of its own per path: two files of one name may serve two routes, and struct annotations are resolved by it.
    name = f"trouterd_algorithm_{path.stem}_{hashlib.sha256(bytes(path)).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise AlgorithmError(f"{path}: not a Python file (its name must end in .py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # code of users, which may be a script that ends
        del sys.modules[name]
        raise AlgorithmError(f"{path}{_line_in(path, error)}: {_told(error)}") from error
    return _exposed(module, str(path))


def _told(error: BaseException) -> str:
    """An exception of users' code in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _line_in(path: Path, error: BaseException) -> str:
    if isinstance(error, SyntaxError) and error.lineno is not None:
        return f":{error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f":{lines[-1]}" if lines else ""


def _exposed(module: ModuleType, what: str) -> Definition:
    if not hasattr(module, _ATTRIBUTE):
        raise AlgorithmError(f"{what}: defines no `{_ATTRIBUTE} = Definition(name, sides, ...)`")
    return _checked(getattr(module, _ATTRIBUTE), what)


def _checked(definition: object, what: str) -> Definition:
    """The definition, if a worker could build its sides.

    Raises:
        AlgorithmError: the first thing that is missing or wrong.
    """
    if not isinstance(definition, Definition):
        raise AlgorithmError(f"{what}: {_ATTRIBUTE} must be an algorithms.base.Definition, not {_kind(definition)}")
    if not 1 <= definition.min_models <= definition.max_models <= MOST_MODELS:
        raise AlgorithmError(f"{what}: needs 1 <= min_models <= max_models <= {MOST_MODELS}")
    if not (isinstance(definition.params, type) and issubclass(definition.params, msgspec.Struct)):
        raise AlgorithmError(f"{what}: params must be a msgspec.Struct class, not {_kind(definition.params)}")
    config = definition.params.__struct_config__
    if not (config.frozen and config.forbid_unknown_fields):
        raise AlgorithmError(f"{what}: {definition.params.__name__} must be frozen=True, forbid_unknown_fields=True")
    built = [_checked_side(definition, side, what) for side in range(definition.min_models)]
    if any(issubclass(one, Drafter) for one in built) and not (
        definition.min_models == definition.max_models == len(built) == 2
        and issubclass(built[0], Drafter)
        and issubclass(built[1], Verifier)
    ):
        raise AlgorithmError(
            f"{what}: only side 0 of exactly two models can be a Drafter, and side 1 must be a Verifier then"
        )
    return definition


def _checked_side(definition: Definition, side: int, what: str) -> type[Algorithm]:
    try:
        built = definition.sides(side)
    except (Exception, SystemExit) as error:  # code of users
        raise AlgorithmError(f"{what}: sides({side}) failed: {_told(error)}") from error
    if not (isinstance(built, type) and issubclass(built, Algorithm)):
        raise AlgorithmError(f"{what}: sides({side}) must give a subclass of Algorithm, not {_kind(built)}")
    if built.route is Algorithm.route and built.decide is Algorithm.decide:
        raise AlgorithmError(f"{what}: {built.__name__} defines neither route() nor decide()")
    if issubclass(built, Drafter) and built.judge is Drafter.judge:
        raise AlgorithmError(f"{what}: {built.__name__} defines no judge()")
    return built


def _kind(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def _check_models(definition: Definition, models: Sequence[str]) -> None:
    low, high = definition.min_models, definition.max_models
    if low <= len(models) <= high:
        return
    takes = f"exactly {low}" if low == high else f"at least {low}" if len(models) < low else f"at most {high}"
    raise AlgorithmError(f"algorithm {definition.name!r} takes {takes} models, the route has {len(models)}", "models")


def _fields(params: type[msgspec.Struct]) -> dict[str, FieldInfo]:
    return {declared.encode_name: declared for declared in msgspec.structs.fields(params)}


def _number(declared: FieldInfo) -> type[int] | type[float] | None:
    """float or int where the field may hold such a number, or a tuple of them (alone or beside other types), else None."""
    parts: list[Type] = [type_info(declared.type)]
    while parts:
        part = parts.pop()
        if isinstance(part, FloatType):
            return float
        if isinstance(part, IntType):
            return int
        if isinstance(part, Metadata):
            parts.append(part.type)
        elif isinstance(part, VarTupleType):
            parts.append(part.item_type)
        elif isinstance(part, UnionType):
            parts.extend(part.types)
    return None


def _description(declared: FieldInfo) -> str:
    """': what it means', or nothing where the field has no description."""
    part = type_info(declared.type)
    text = (part.extra_json_schema or {}).get("description") if isinstance(part, Metadata) else None
    return f": {text}" if text else ""


def _choices(declared: FieldInfo) -> list[object]:
    """The values that a field of a literal or enumeration type may have."""
    part = type_info(declared.type)
    part = part.type if isinstance(part, Metadata) else part
    parts = part.types if isinstance(part, UnionType) else (part,)
    values: list[object] = []
    for one in parts:
        if isinstance(one, LiteralType):
            values += one.values
        elif isinstance(one, EnumType):
            values += [member.value for member in one.cls]
    return values


def _converted(definition: Definition, declared: FieldInfo, value: object) -> Any:
    """The value in the field's type.

    Raises:
        AlgorithmError: wrong type, out of range, or no finite number.
    """
    name = declared.encode_name
    where = f"algorithm {definition.name!r}, parameter {name!r}"
    if isinstance(value, float) and not math.isfinite(value):
        raise AlgorithmError(f"{where}: must be a finite number, not {value}", name)
    try:
        converted = msgspec.convert(value, declared.type)
    except msgspec.ValidationError as error:
        # "Expected `int`, got `float`" or "Invalid enum value 'x'": the value itself says more, and says it once.
        reason = re.sub(r", got `\w+`|^Invalid enum value .*", "", str(error))
        reason = reason[:1].lower() + reason[1:] or f"expected one of {', '.join(map(str, _choices(declared)))}"
        raise AlgorithmError(f"{where}: {reason}, not {value!r}", name) from error
    numbers = (converted if isinstance(converted, tuple) else (converted,)) if _number(declared) else ()
    if not all(abs(number) <= _LARGEST for number in numbers if isinstance(number, int | float)):
        raise AlgorithmError(f"{where}: numbers must be within {_LARGEST:.2g} of 0, not {str(value)[:64]}", name)
    return converted


def _unknown_param(definition: Definition, name: str) -> AlgorithmError:
    known = tuple(_fields(definition.params))
    takes = f"it takes {', '.join(known)}" if known else "it takes none"
    return AlgorithmError(
        f"algorithm {definition.name!r} has no parameter {name!r}{_suggest(name, known)}; {takes}", name
    )


def _suggest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
