"""Log lines: one per event, in both shapes."""

from __future__ import annotations

import json
import logging
import sys

from trouterd.logs import JsonFormatter, TextFormatter


def record(message: str, **extra: object) -> logging.LogRecord:
    made = logging.LogRecord("trouterd.api", logging.WARNING, __file__, 1, message, ("x",), None)
    made.created, made.msecs = 1.25, 250.0
    vars(made).update(extra)
    return made


def with_traceback() -> logging.LogRecord:
    try:
        raise ValueError("first\nsecond")
    except ValueError:
        made = record("%s failed")
        made.exc_info = sys.exc_info()
        return made


def test_text_is_one_line() -> None:
    text = TextFormatter("api")
    line = text.format(record("%s came", request_id="r1"))
    assert line == "1970-01-01T00:00:01.250Z WARNING api trouterd.api: x came request_id=r1"
    failed = text.format(with_traceback())
    assert "\n" not in failed
    assert failed.endswith("ValueError: first\\nsecond")


def test_json_is_one_object() -> None:
    event = json.loads(JsonFormatter("small").format(record("%s came", request_id="r1", path=object)))
    assert {key: event[key] for key in ("time", "level", "process", "logger", "message", "request_id")} == {
        "time": "1970-01-01T00:00:01.250Z",
        "level": "warning",
        "process": "small",
        "logger": "trouterd.api",
        "message": "x came",
        "request_id": "r1",
    }
    failed = JsonFormatter("small").format(with_traceback())
    assert "\n" not in failed
    assert "ValueError: first" in json.loads(failed)["traceback"]
