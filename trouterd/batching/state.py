"""The file that keeps what the controller has learned between two runs of the daemon."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from trouterd.batching.controller import Kept
from trouterd.config import Config

log = logging.getLogger(__name__)

VERSION = 1
NAME = "batching.json"


class _File(msgspec.Struct):
    version: int
    fingerprint: str
    """Of models and routes: what was learned of others is worth nothing."""
    groups: dict[str, Kept] = {}
    """By the group's first model."""


def path_of(config: Config, environ: Mapping[str, str]) -> Path | None:
    """Where the file is: batching.state, else systemd's state directory, else beside the control socket; None without any."""
    if config.batching.state:
        return Path(config.batching.state)
    # Several folders are separated by colons; the first one is the unit's own.
    if folder := environ.get("STATE_DIRECTORY", "").partition(":")[0]:
        return Path(folder) / NAME
    control = config.server.control
    return Path(control).with_suffix(f".{NAME}") if control else None


def load(path: Path | None, fingerprint: str) -> dict[str, Kept]:
    """What the file keeps; nothing where it is absent, unreadable, of another version or of other models, which is logged."""
    if path is None:
        return {}
    try:
        kept = msgspec.json.decode(path.read_bytes(), type=_File)
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        log.warning("batching.state: %s is not used: %s", path, error)
        return {}
    if kept.version != VERSION or kept.fingerprint != fingerprint:
        log.info("batching.state: %s is of other models, routes or another version, and not used", path)
        return {}
    return kept.groups


def save(path: Path | None, fingerprint: str, groups: dict[str, Kept]) -> None:
    """Replace the file, all or nothing; a failure is logged."""
    if path is None:
        return
    fresh = path.with_name(f"{path.name}.new")
    try:
        fresh.write_bytes(msgspec.json.format(msgspec.json.encode(_File(VERSION, fingerprint, groups))))
        os.replace(fresh, path)  # noqa: PTH105 - says that it replaces
    except OSError as error:
        log.warning("batching.state: %s cannot be written: %s", path, error)
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)
