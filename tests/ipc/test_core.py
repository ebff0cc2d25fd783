"""Which core is used, and which fences the pure-Python one relies on."""

from __future__ import annotations

import importlib
import logging
from types import ModuleType

import pytest

from ipc import core as core_module
from ipc import fallback, fence, layout
from ipc.core import load_core
from ipc.errors import UnsupportedMachineError
from ipc.eventfd import create_event
from ipc.ring import PushResult, RingConsumer, RingProducer
from ipc.segment import SharedSegment
from tests.ipc.rings import SMALL, core, readable


@pytest.fixture
def no_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = importlib.import_module

    def import_module(name: str) -> ModuleType:
        if name == "ipc._ring":
            raise ImportError(name)
        return plain(name)

    monkeypatch.setattr(core_module.importlib, "import_module", import_module)


def test_the_c_core_comes_first() -> None:
    assert load_core() is core("c")
    assert load_core("python") is fallback


def test_without_the_extension_the_python_core_is_used_with_a_warning(
    no_extension: None, caplog: pytest.LogCaptureFixture
) -> None:
    assert load_core() is fallback
    assert "not built" in caplog.text
    with pytest.raises(ImportError):
        load_core("c")


@pytest.mark.parametrize("machine", ["aarch64", "ppc64le", "riscv64"])
def test_the_python_core_refuses_other_machines(
    machine: str, no_extension: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fence.platform, "machine", lambda: machine)
    with pytest.raises(UnsupportedMachineError, match=machine):
        fence.require_x86_64()
    monkeypatch.delitem(core_module.importlib.sys.modules, "ipc.fallback")
    with pytest.raises(UnsupportedMachineError, match="build the C core"):
        load_core()


def test_without_membarrier_every_push_is_fenced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fence, "_membarrier", lambda _: -1)
    with caplog.at_level(logging.WARNING):
        fast, sleep, by_membarrier = fence.choose_fences()
    assert not by_membarrier
    assert fence.no_fence not in (fast, sleep)
    assert "membarrier is not available" in caplog.text
    fast()
    sleep()


def test_a_failing_membarrier_is_an_error_not_a_missed_wake(monkeypatch: pytest.MonkeyPatch) -> None:
    class Libc:
        syscall = staticmethod(lambda *_: -1)

    monkeypatch.setattr(fence.ctypes, "CDLL", lambda *_, **__: Libc)
    with pytest.raises(OSError, match="membarrier"):
        fence.membarrier_fence()()


@pytest.mark.parametrize("mode", [0, 1])
def test_a_c_reader_wakes_for_a_writer_of_either_fence_mode(mode: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if mode and not fence.register_membarrier():
        pytest.skip("membarrier is not available here")
    monkeypatch.setattr(fallback, "FENCE", mode)
    segment, data = SharedSegment.create(SMALL), create_event()
    with (
        RingProducer(segment, data, core=fallback) as producer,
        RingConsumer(segment, data, core=core("c")) as consumer,
    ):
        assert segment.halves[layout.OFF_PRODUCER_FENCE // 4] == mode
        readable(data)
        assert consumer.prepare_wait()
        assert producer.try_push(b"x", 1) is PushResult.PUBLISHED_WOKE
        assert readable(data)
    segment.close()
