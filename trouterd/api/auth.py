"""Bearer keys."""

from __future__ import annotations

import hmac
import logging
import stat
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler

from trouterd.api.errors import RequestError
from trouterd.api.services import SERVICES

log = logging.getLogger("trouterd.api.auth")

OPEN_PATHS = frozenset(("/health", "/ready"))


class KeyFileError(ValueError):
    """The key file cannot be used; the message names it."""


def load_keys(path: str) -> tuple[bytes, ...]:
    """The keys in a file, one a line; none for path ''.

    Raises:
        KeyFileError: unreadable, or without a key.
    """
    if not path:
        return ()
    file = Path(path)
    try:
        text, mode = file.read_text(encoding="utf-8"), file.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        raise KeyFileError(f"server.api_key_file {path!r} cannot be read: {error}") from error
    keys = tuple(line.strip().encode() for line in text.splitlines() if line.strip())
    if not keys:
        raise KeyFileError(f"server.api_key_file {path!r} holds no key")
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        log.warning("server.api_key_file %s is accessible to others (mode %o); use chmod 600", path, mode & 0o777)
    return keys


def _matches(authorization: str, keys: tuple[bytes, ...]) -> bool:
    """Compares with every key in constant time, so that answers tell nothing about how close a guess was."""
    scheme, _, token = authorization.partition(" ")
    offered = token.strip().encode("utf-8", "surrogateescape")
    hits = sum(hmac.compare_digest(offered, key) for key in keys)
    return scheme.lower() == "bearer" and hits > 0


@web.middleware
async def require_key(request: web.Request, handler: Handler) -> web.StreamResponse:
    """401 without a valid key, on every path but liveness and readiness."""
    keys = request.app[SERVICES].api_keys
    if keys and request.path not in OPEN_PATHS and not _matches(request.headers.get("Authorization", ""), keys):
        raise RequestError(401, "invalid_api_key", "a valid API key is needed: Authorization: Bearer KEY")
    return await handler(request)
