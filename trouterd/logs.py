"""Logging of every process: one line per event on standard error, as text or JSON. Prompts and answers are never logged."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any, Literal

LogFormat = Literal["text", "json"]
_RECORD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def _stamp(record: logging.LogRecord) -> str:
    """UTC time with milliseconds."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"


def _extras(record: logging.LogRecord) -> dict[str, Any]:
    """What the caller gave as `extra`, for example a request id."""
    return {key: value for key, value in vars(record).items() if key not in _RECORD_FIELDS}


class TextFormatter(logging.Formatter):
    """`TIME LEVEL PROCESS LOGGER: message key=value`; a traceback is folded into the same line."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        line = f"{_stamp(record)} {record.levelname} {self._process} {record.name}: {record.getMessage()}"
        for key, value in _extras(record).items():
            line += f" {key}={value}"
        if record.exc_info:
            line += " | " + self.formatException(record.exc_info)
        return line.replace("\n", "\\n")


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, process, logger, message, the caller's extras and `traceback`."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        event: dict[str, Any] = {
            "time": _stamp(record),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        event.update(_extras(record))
        if record.exc_info:
            event["traceback"] = self.formatException(record.exc_info)
        return json.dumps(event, default=str, ensure_ascii=False)


def setup(process: str, level: str, log_format: LogFormat) -> None:
    """Send the root logger to standard error; called once per process, replaces earlier handlers."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process) if log_format == "json" else TextFormatter(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    set_level(level)
    # asyncio's debug lines and the HTTP access log repeat what our own events say.
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    logging.captureWarnings(True)


def set_level(level: str) -> None:
    """Change the lowest level that is logged; `level` is a value of server.log_level."""
    logging.getLogger().setLevel(level.upper())
