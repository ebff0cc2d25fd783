"""Creation, names, modes, sizes and inheritance of segments."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import subprocess
import sys
from pathlib import Path

import posix_ipc
import pytest

from ipc import segment as segment_module
from ipc.errors import SegmentError
from ipc.eventfd import create_event
from ipc.host import boot_id, start_ticks
from ipc.layout import RingSpec
from ipc.ring import RingProducer
from ipc.segment import Backend, SharedSegment
from ipc.sweep import SHM_FOLDER, sweep
from tests.ipc.rings import SMALL


def names_of(pid: int) -> list[str]:
    return [path.name for path in SHM_FOLDER.glob(f"trouterd-*-{pid}-*")]


def open_descriptors() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


@pytest.mark.parametrize("backend", Backend)
@pytest.mark.parametrize("umask", [0o000, 0o077, 0o777])
def test_mode_is_0600_under_any_umask(backend: Backend, umask: int) -> None:
    before = os.umask(umask)
    try:
        segment = SharedSegment.create(SMALL, backend=backend)
        assert os.umask(umask) == umask
    finally:
        os.umask(before)
    assert os.fstat(segment.fileno()).st_mode & 0o777 == 0o600
    segment.close()


def test_the_name_is_gone_at_once_and_the_pages_are_there() -> None:
    segment = SharedSegment.create(SMALL)
    assert names_of(os.getpid()) == []
    assert segment.name is None
    status = os.fstat(segment.fileno())
    assert status.st_size == 8192
    assert status.st_blocks * 512 >= 8192
    assert status.st_nlink == 0
    segment.close()


def test_a_kept_name_has_the_agreed_form_and_dies_with_the_segment() -> None:
    segment = SharedSegment.create(SMALL, unlink=False)
    ticks = start_ticks(os.getpid())
    assert segment.name == f"/trouterd-{boot_id()[:8]}-{os.getpid()}-{ticks}-100000002"
    assert names_of(os.getpid()) == [segment.name[1:]]
    with pytest.raises(SegmentError, match="in use"):
        SharedSegment.create(SMALL)
    segment.close()
    segment.close()
    assert names_of(os.getpid()) == []


def test_descriptors_are_not_inherited_by_accident() -> None:
    for backend in Backend:
        segment = SharedSegment.create(SMALL, backend=backend)
        assert fcntl.fcntl(segment.fileno(), fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        other = SharedSegment.from_fd(segment.fileno())
        assert fcntl.fcntl(other.fileno(), fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        other.close()
        segment.close()


def test_a_memfd_cannot_be_resized_by_a_peer() -> None:
    segment = SharedSegment.create(SMALL, backend=Backend.MEMFD)
    for size in (0, 4096, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(segment.fileno(), size)
    segment.close()


CHILD = """
import os, sys
from ipc.ring import RingConsumer, RingProducer
from ipc.segment import SharedSegment
ring, data, space = map(int, sys.argv[1:])
with RingConsumer(SharedSegment.from_fd(ring), data, space) as consumer:
    consumer.poll(lambda kind, view: print(kind, bytes(view).decode()))
"""


@pytest.mark.parametrize("backend", Backend)
def test_a_ring_passes_over_exec(backend: Backend) -> None:
    segment = SharedSegment.create(SMALL, backend=backend)
    events = create_event(), create_event()
    with RingProducer(segment, *events) as producer:
        producer.try_push(b"over exec", 5)
        fds = [segment.fileno(), *events]
        command = [sys.executable, "-c", CHILD, *map(str, fds)]
        result = subprocess.run(command, pass_fds=fds, capture_output=True, text=True, check=True)
        assert result.stdout == "5 over exec\n"
        assert producer.free_bytes == SMALL.capacity
    assert segment.stats()["consumer_epoch"] == 1
    segment.close()
    for event in events:
        os.close(event)


def test_the_lock_of_a_dead_process_is_free_although_its_parent_has_the_descriptor() -> None:
    segment = SharedSegment.create(SMALL)
    script = CHILD.replace("consumer.poll", "os.abort() or consumer.poll")
    fds = [segment.fileno(), os.eventfd(0), os.eventfd(0)]
    for epoch in (1, 2):
        command = [sys.executable, "-c", script, *map(str, fds)]
        assert subprocess.run(command, pass_fds=fds, check=False, stderr=subprocess.PIPE).returncode == -6
        assert segment.stats()["consumer_epoch"] == epoch
    segment.close()
    for fd in fds[1:]:
        os.close(fd)


def test_no_room_is_an_error_with_both_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(segment_module.os, "posix_fallocate", full)
    before = open_descriptors()
    with pytest.raises(SegmentError, match=r"needs 8192 bytes of shared memory, \d+ are free"):
        SharedSegment.create(SMALL)
    assert open_descriptors() == before
    assert names_of(os.getpid()) == []


TINY = """
mount -t tmpfs -o size=1m none /dev/shm || exit 77
exec "$0" -c '
from ipc.errors import SegmentError
from ipc.eventfd import create_event
from ipc.layout import RingSpec
from ipc.segment import SharedSegment
small = SharedSegment.create(RingSpec(ring_id=1, capacity=1 << 16, max_record=1 << 12))
try:
    SharedSegment.create(RingSpec(ring_id=2))
except SegmentError as error:
    print(error)
small.buffer[4096:] = bytes(1 << 16)
'
"""


def test_a_small_tmpfs_gives_a_clean_error() -> None:
    command = ["unshare", "-Urm", "--propagation", "private", "sh", "-c", TINY, sys.executable]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("unshare is missing")
    if result.returncode == 77 or "unshare" in result.stderr:
        pytest.skip(f"mounting a tmpfs is not permitted here: {result.stderr.strip()}")
    assert result.returncode == 0, result.stderr
    assert re.search(r"needs 1052672 bytes of shared memory, 9\d{5} are free", result.stdout)


def plant(name: str, uid: int | None = None) -> Path:
    memory = posix_ipc.SharedMemory(f"/{name}", posix_ipc.O_CREX, size=4096)
    memory.close_fd()
    if uid is not None:
        os.chown(SHM_FOLDER / name, uid, -1)
    return SHM_FOLDER / name


def test_sweep_removes_stale_names_and_spares_the_others() -> None:
    boot, me, ticks = boot_id()[:8], os.getpid(), start_ticks(os.getpid())
    other_boot = f"{int(boot, 16) ^ 1:08x}"
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    stale = [
        plant(f"trouterd-{other_boot}-{me}-{ticks}-1"),
        plant(f"trouterd-{boot}-{gone.pid}-5-1"),
        plant(f"trouterd-{boot}-{me}-1-2"),
    ]
    spared = [
        plant(f"trouterd-{boot}-{me}-{ticks}-1"),
        plant(f"trouterd-{boot}-{me}-other"),
        plant(f"trouterdx-{boot}-{gone.pid}-5-1"),
    ]
    if os.getuid() == 0:
        spared.append(plant(f"trouterd-{boot}-{gone.pid}-6-1", uid=12345))
    try:
        assert {path.name for path in stale} <= set(sweep())
        assert not any(path.exists() for path in stale)
        assert all(path.exists() for path in spared)
    finally:
        for path in [*stale, *spared]:
            path.unlink(missing_ok=True)


SUPERVISOR = """
import os, subprocess, sys, time
from ipc.eventfd import create_event
from ipc.layout import RingSpec
from ipc.ring import RingProducer
from ipc.segment import Backend, SharedSegment
WORKER = '''
import sys, time
from ipc.ring import RingConsumer, RingProducer
from ipc.segment import SharedSegment
end, ring, data, space = sys.argv[1], *map(int, sys.argv[2:])
held = {"p": RingProducer, "c": RingConsumer}[end](SharedSegment.from_fd(ring), data, space)
print("attached", flush=True)
time.sleep(600)
'''
segment = SharedSegment.create(RingSpec(ring_id=1), backend=Backend(sys.argv[1]))
fds = [segment.fileno(), create_event(), create_event()]
workers = [
    subprocess.Popen([sys.executable, "-c", WORKER, end, *map(str, fds)], pass_fds=fds, stdout=subprocess.PIPE)
    for end in "pc"
]
for worker in workers:
    worker.stdout.readline()
print(*[worker.pid for worker in workers], flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("backend", Backend)
@pytest.mark.parametrize("supervisor_first", [True, False])
def test_nothing_is_left_when_everyone_is_killed(backend: Backend, supervisor_first: bool) -> None:
    command = [sys.executable, "-c", SUPERVISOR, backend.value]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        workers = [int(pid) for pid in supervisor.stdout.readline().split()]
        assert len(workers) == 2
        pidfds = [os.pidfd_open(pid) for pid in workers]
        victims = [supervisor.pid, *workers] if supervisor_first else [*workers, supervisor.pid]
        for pid in victims:
            os.kill(pid, 9)
            assert names_of(supervisor.pid) == []
    for pidfd in pidfds:
        os.close(pidfd)
    assert names_of(supervisor.pid) == []


def test_every_ring_of_a_full_mesh_fits_the_smallest_usual_shm() -> None:
    workers = 6
    rings = workers * (workers - 1) + 2 * workers
    assert rings * RingSpec(ring_id=0).segment_bytes < 64 << 20
