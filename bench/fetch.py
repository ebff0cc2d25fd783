"""A GET over TCP or a unix socket, for programs that have no event loop."""

from __future__ import annotations

import http.client
import socket
from pathlib import Path
from urllib.parse import urlsplit

UNIX = "unix:"


class FetchError(Exception):
    """No answer, or none with status 200."""


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect(str(self._path))


def fetch(url: str, path: str) -> bytes:
    """The body of the answer.

    Args:
        url: `http://host:port` or `unix:/path/of.sock`.
        path: of the resource.

    Raises:
        FetchError: there is none.
        ValueError: no such URL.
    """
    connection = _connection(url)
    try:
        connection.request("GET", path, headers={"Connection": "close"})
        answer = connection.getresponse()
        body = answer.read()
    except (OSError, http.client.HTTPException) as error:
        raise FetchError(f"GET {path} of {url}: {error}") from error
    finally:
        connection.close()
    if answer.status != http.HTTPStatus.OK:
        raise FetchError(f"GET {path} of {url}: HTTP {answer.status}")
    return body


def _connection(url: str) -> http.client.HTTPConnection:
    if url.startswith(UNIX):
        return _UnixConnection(Path(url.removeprefix(UNIX)))
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        raise ValueError(f"expected http://host:port or unix:/path/of.sock, got {url!r}")
    return http.client.HTTPConnection(parts.hostname, parts.port)
