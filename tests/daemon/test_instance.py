"""What the other tests here ask a daemon by."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from tests.daemon.instance import Instance


async def test_a_worker_that_misses_the_status_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    idle = dict.fromkeys(
        ("requests_running", "requests_waiting", "requests_pending", "requests_away", "pages_owned"), 0
    )
    late = {"error": "large: no answer to 'status' in 1 s"}
    answers = iter([{"small": idle, "large": late}, {"small": idle, "large": idle}])

    async def ctl(instance: Instance, *arguments: str) -> Any:
        del instance
        assert arguments == ("status",)
        return {"workers": next(answers)}

    monkeypatch.setattr(Instance, "ctl", ctl)
    nowhere = cast(asyncio.subprocess.Process, None)
    assert await Instance(nowhere, Path(), Path()).idle() == {"small": idle, "large": idle}
