"""The folder in which labels are collected: one file per shard, so that an interrupted run goes on where it was."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from trouterd.training.faults import TrainingError

T = TypeVar("T")
Tensors = dict[str, torch.Tensor]
SHARD = 32
"""Prompts of one shard."""
_ARGUMENTS = "arguments.json"
TUNING = "tuning.pt"
"""Where a fine-tuning stands."""


class Shards:
    """Files of one run; whatever labels depend on is written down in `arguments.json`.

    Args:
        folder: made if it is not there.
        arguments: what the labels depend on, as JSON values.
        fresh: throw away what another run left.

    Raises:
        TrainingError: the folder holds labels of other arguments, or cannot be written.
    """

    def __init__(self, folder: Path, arguments: Mapping[str, Any], *, fresh: bool = False) -> None:
        self.folder = folder
        try:
            folder.mkdir(exist_ok=True)
            if fresh:
                for file in (*folder.glob("*.safetensors"), folder / TUNING, folder / _ARGUMENTS):
                    file.unlink(missing_ok=True)
            self._claim(dict(arguments))
        except OSError as error:
            raise TrainingError(f"{folder}: {error.strerror or error}") from error

    def collect(
        self,
        name: str,
        items: Sequence[T],
        label: Callable[[Sequence[T], int], Tensors],
        done: Callable[[int], None],
        size: int = 0,
    ) -> Tensors:
        """Labels of all items, those that are there already from their files.

        Args:
            name: of the files.
            items: prompts, for example.
            label: items of one shard and the number of the first one -> tensors; equal names in all shards.
            done: hears of the number of items that each shard brought.
            size: items of one shard; 0: SHARD.

        Returns:
            The tensors of all shards, concatenated.
        """
        size, shards = size or SHARD, []
        for start in range(0, len(items), size):
            piece = items[start : start + size]
            shards.append(self._shard(f"{name}-{start // size:05d}", partial(label, piece, start)))
            done(len(piece))
        return {key: torch.cat([shard[key] for shard in shards]) for key in shards[0]} if shards else {}

    def _shard(self, name: str, make: Callable[[], Tensors]) -> Tensors:
        path = self.folder / f"{name}.safetensors"
        if path.exists():
            try:
                return load_file(path)
            except (SafetensorError, OSError) as error:
                raise TrainingError(
                    f"{path}: cannot be read: {error}; delete it, or start over with --fresh"
                ) from error
        tensors = {key: value.contiguous() for key, value in make().items()}
        unfinished = path.with_suffix(".partial")
        try:
            save_file(tensors, unfinished)
            unfinished.replace(path)  # a shard is whole or not there
        except (SafetensorError, OSError) as error:
            raise TrainingError(f"{path}: cannot be written: {error}") from error
        return tensors

    def _claim(self, arguments: dict[str, Any]) -> None:
        path = self.folder / _ARGUMENTS
        if not path.exists():
            unfinished = path.with_suffix(".partial")
            unfinished.write_bytes(msgspec.json.format(msgspec.json.encode(arguments), indent=2) + b"\n")
            unfinished.replace(path)
            return
        try:
            found = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise TrainingError(f"{path}: not a run of ours: {error}; give another --output") from error
        differing = sorted(key for key in {*found, *arguments} if found.get(key) != arguments.get(key))
        if differing:
            key = differing[0]
            raise TrainingError(
                f"{self.folder}: holds labels of a run with other arguments ({', '.join(differing)}; {key} was"
                f" {found.get(key)!r}, is {arguments.get(key)!r}); throw them away with --fresh, or give another --output"
            )


def model_digest(directory: Path) -> str:
    """What tells one checkpoint from another without reading it: its configuration, and names, sizes and times of its weights."""
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(directory.glob("*")):
        if file.name == "config.json":
            digest.update(file.read_bytes())
        elif file.suffix in (".safetensors", ".bin"):
            status = file.stat()  # follows links, which model caches consist of
            digest.update(f"{file.name} {status.st_size} {status.st_mtime_ns}".encode())
    return digest.hexdigest()


def ids_digest(texts: Sequence[Sequence[int]]) -> str:
    """A fingerprint of lists of ids."""
    return hashlib.blake2b(msgspec.json.encode([list(text) for text in texts]), digest_size=8).hexdigest()
