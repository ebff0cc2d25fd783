"""Reads files of trained heads: tensors and plain values only, never code."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from algorithms.registry import AlgorithmError

_DAMAGED = (
    pickle.UnpicklingError,
    struct.error,
    RuntimeError,
    EOFError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    AssertionError,
    SafetensorError,
)
"""What torch's reader, which takes safetensors files by their name, raises at files that are cut off or damaged."""


def load_mapping(path: Path, key: str) -> dict[str, Any]:
    """A dict that torch.save wrote, read with `weights_only`.

    Args:
        path: the file.
        key: the parameter that names it, for messages.

    Raises:
        AlgorithmError: no such file, not such a file, or one that holds code.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise AlgorithmError(f"{key}: {path}: {error.strerror or error}", key) from error
    except _DAMAGED as error:
        reason = str(error).split("\n", 1)[0] or type(error).__name__
        raise AlgorithmError(
            f"{key}: {path}: not a checkpoint of tensors and plain values (code is never run): {reason}", key
        ) from error
    if not isinstance(content, dict):
        raise AlgorithmError(f"{key}: {path}: must hold a dict, holds {type(content).__name__}", key)
    return content


def load_safetensors(path: Path, key: str) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file. Raises AlgorithmError as `load_mapping` does."""
    try:
        return load_file(path)
    except OSError as error:
        raise AlgorithmError(f"{key}: {path}: {error.strerror or error}", key) from error
    except SafetensorError as error:
        raise AlgorithmError(f"{key}: {path}: not a safetensors file: {error}", key) from error


class Tensors:
    """The state dict of one file; a missing key or another shape is an error that names both."""

    def __init__(self, path: Path, key: str, tensors: object) -> None:
        if not isinstance(tensors, Mapping) or not all(isinstance(value, torch.Tensor) for value in tensors.values()):
            raise AlgorithmError(f"{key}: {path}: state_dict: must map names to tensors", key)
        self._path = path
        self._key = key
        self._tensors: Mapping[str, torch.Tensor] = tensors
        self._taken: set[str] = set()

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """The named tensor as float64, checked against its shape and for values that no head can have. Raises AlgorithmError."""
        tensor = self._tensors.get(name)
        if tensor is None:
            raise self.error(f"{name}: missing")
        if tuple(tensor.shape) != shape:
            raise self.error(f"{name}: has shape {tuple(tensor.shape)}, {shape} is needed")
        if tensor.is_meta or tensor.layout is not torch.strided or not tensor.is_floating_point():
            raise self.error(f"{name}: is no dense tensor of floating-point numbers")
        # A threshold would compare as false with all that comes of these, and the head would seem to work.
        if not tensor.isfinite().all():
            raise self.error(f"{name}: holds values that are not finite")
        self._taken.add(name)
        return tensor.double()

    def has(self, name: str) -> bool:
        """Whether the file holds such a tensor."""
        return name in self._tensors

    def columns(self, name: str) -> int:
        """Width of the named matrix. Raises AlgorithmError."""
        tensor = self._tensors.get(name)
        if tensor is None:
            raise self.error(f"{name}: missing")
        if tensor.dim() != 2:
            raise self.error(f"{name}: has shape {tuple(tensor.shape)}, a matrix is needed")
        return tensor.shape[1]

    def finish(self, ignored: tuple[str, ...] = ()) -> None:
        """Refuse names that nothing has asked for: they would change the answer. Raises AlgorithmError."""
        if unknown := sorted(self._tensors.keys() - self._taken - set(ignored)):
            raise self.error(f"{unknown[0]}: unknown tensor ({len(unknown)} in all)")

    def error(self, problem: str) -> AlgorithmError:
        """An error of this file."""
        return AlgorithmError(f"{self._key}: {self._path}: {problem}", self._key)
