"""What a command line sets of all daemons of an experiment, by keys of the configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.experiment_case import CaseError
from trouterd.config import Config
from trouterd.config_dump import toml_value
from trouterd.keys import UnknownKeyError, parse_text, resolve, value_problem

FLAG = "--set"
_EVERY = "*"
"""In place of a model's name: all of them."""
_MODELS = "models"
_TAKEN = {
    "path": "the options --small, --middle and --large",
    "format": "the options --small, --middle and --large",
    "tokenizer": "the options --small, --middle and --large",
    "device": "the option --devices",
    "tensor_parallel": "the option --tensor-parallel",
    "thresholds": "the windows themselves",
    "mode": "the windows themselves",
    "socket": "the experiment itself",
    "control": "the experiment itself",
}
"""By the key's last part, who says it."""
_TAKEN_SECTIONS = (_MODELS, "batching", "server")


@dataclass(frozen=True, slots=True)
class Settings:
    """Values by dotted key of the configuration, such as `models.small.megakernel_percent`."""

    values: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, texts: Sequence[str], names: Sequence[str]) -> Settings:
        """From KEY=VALUE, the last one of a key counting.

        Args:
            texts: keys are those of the configuration; `small.KEY` is short for `models.small.KEY`, `*.KEY` is for every model.
            names: of the models.

        Raises:
            CaseError: no such key, a value that does not fit it, or a key that something else says; the message names it.
        """
        values: dict[str, Any] = {}
        for text in texts:
            name, found, value = text.partition("=")
            if not found:
                raise CaseError(f"{FLAG}: expected KEY=VALUE, such as small.megakernel_percent=30, got {text!r}")
            for key in _spelled_out(name.strip(), names):
                values[key] = _value(key, value.strip(), names)
        return cls(values)

    def of_model(self, name: str) -> dict[str, Any]:
        """Keys of one model's table."""
        start = f"{_MODELS}.{name}."
        return {key.removeprefix(start): value for key, value in self.values.items() if key.startswith(start)}

    def model_lines(self, name: str) -> tuple[str, ...]:
        """The same in TOML."""
        return tuple(f"{key} = {toml_value(value)}" for key, value in self.of_model(name).items())

    def lines(self) -> tuple[str, ...]:
        """Everything else in TOML, each line complete."""
        found = [
            (*key.rsplit(".", 1), value) for key, value in self.values.items() if not key.startswith(f"{_MODELS}.")
        ]
        return tuple(f"[{table}]\n{key} = {toml_value(value)}" for table, key, value in found)


def told(values: Mapping[str, Any]) -> str:
    """For people: `small.megakernel_percent = 30, batching.overlap = false`; of several models with the same
    `context_length = 4096 (small, large)`; '' for none."""
    models: dict[str, list[str]] = {}
    for key, value in values.items():
        name, setting = _apart(key)
        models.setdefault(f"{setting} = {toml_value(value)}", []).append(name)
    return ", ".join(
        f"{text} ({', '.join(names)})" if len(names) > 1 else f"{names[0]}.{text}" if names[0] else text
        for text, names in models.items()
    )


def _apart(key: str) -> tuple[str, str]:
    """The model of a key, or "", and the rest of it."""
    if not key.startswith(f"{_MODELS}."):
        return "", key
    name, _, setting = key.removeprefix(f"{_MODELS}.").partition(".")
    return name, setting


def _spelled_out(key: str, names: Sequence[str]) -> Iterator[str]:
    head, _, rest = key.removeprefix(f"{_MODELS}.").partition(".")
    if head in (*names, _EVERY):
        yield from (f"{_MODELS}.{name}.{rest}" for name in (names if head == _EVERY else (head,)))
    else:
        yield key


def _value(name: str, text: str, models: Sequence[str]) -> Any:
    try:
        path, key = resolve(Config, name, {_MODELS: {model: {} for model in models}})
    except UnknownKeyError as error:
        raise CaseError(f"{FLAG} {name}: {error}; models are named {', '.join(models)}") from error
    if key is None:
        raise CaseError(f"{FLAG} {name}: routes are the experiment's own")
    if path[-1] in _TAKEN and path[0] in _TAKEN_SECTIONS:
        raise CaseError(f"{FLAG} {name}: is said by {_TAKEN[path[-1]]}")
    value = parse_text(key, text)
    if problem := value_problem(key, value):
        raise CaseError(f"{FLAG} {name}: {problem}")
    return value
