"""python -m bench.ipc_worker TRANSPORT TEST SIZE COUNT: one measurement in fresh processes, printed as JSON."""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Protocol

from bench.ipc_peers import BlockingPair, PipeChannel, QueueChannel, SocketPair, ZmqChannel
from bench.ipc_ring import RingPair, push_ns
from ipc.messages import PeerReq, decode, encode

SPIN_US = 50


class Pair(Protocol):
    """Two processes and what is measured between them; made before the fork."""

    def echo(self, count: int) -> None: ...

    def ping(self, payload: bytes, count: int) -> list[int]: ...

    def receive(self, count: int, ready: Callable[[], object]) -> None: ...

    def send(self, payload: bytes, count: int, wait_ready: Callable[[], object]) -> int: ...

    def wakes(self) -> int: ...


PAIRS: dict[str, Callable[[], Pair]] = {
    "ring": lambda: RingPair("c", 0),
    "ring spin": lambda: RingPair("c", SPIN_US),
    "ring python": lambda: RingPair("python", 0),
    "socket": SocketPair,
    "pipe": lambda: BlockingPair(PipeChannel()),
    "zmq": lambda: BlockingPair(ZmqChannel()),
    "queue": lambda: BlockingPair(QueueChannel()),
}


def measure(pair: Pair, test: str, size: int, count: int) -> dict[str, float]:
    """Runs both ends, each on a core of its own where there are two."""
    payload = os.urandom(size)
    cpus = sorted(os.sched_getaffinity(0))
    ready, set_ready = os.pipe()
    child = os.fork()
    side = 0 if child else 1
    os.sched_setaffinity(0, {cpus[side % len(cpus)]})
    if not child:
        if test == "round trip":
            pair.echo(count)
        else:
            pair.receive(count, lambda: os.write(set_ready, b"x"))
        sys.stdout.flush()
        os._exit(0)
    if test == "round trip":
        times = sorted(pair.ping(payload, count))
        outcome = {f"p{per}": times[min(count - 1, int(count * per / 100))] / 1000 for per in (50, 99, 99.9)}
    else:
        spent = pair.send(payload, count, lambda: os.read(ready, 1))
        outcome = {"messages_per_s": count / spent * 1e9}
    _, status, usage = os.wait4(child, 0)
    if status:
        raise SystemExit(f"the far end failed: {status}")
    own = resource.getrusage(resource.RUSAGE_SELF)
    outcome["wakes_per_1000"] = pair.wakes() / count * 1000
    outcome["involuntary_switches"] = float(own.ru_nivcsw + usage.ru_nivcsw)
    outcome["voluntary_switches"] = float(own.ru_nvcsw + usage.ru_nvcsw)
    return outcome


def codec_us(tokens: int, count: int) -> float:
    """Microseconds to encode and decode a hand-off that carries `tokens` token ids."""
    message = PeerReq(
        rid=1 << 40, source=0, destination=1, entry=0, handoff_seq=7, start=0, token_ids=os.urandom(4 * tokens),
        loc=tokens, known=(tokens, tokens), writers=bytes(tokens),
    )  # fmt: skip
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter_ns()
        for _ in range(count):
            payload, kind = encode(message)
            decode(kind, memoryview(payload))
        best = min(best, (time.perf_counter_ns() - start) / count / 1000)
    return best


def main() -> None:
    """See the module's first line."""
    transport, test, size, count = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    gc.disable()
    if test == "push":
        outcome = {"ns": push_ns(size, count)}
    elif test == "codec":
        outcome = {"us": codec_us(size, count)}
    else:
        outcome = measure(PAIRS[transport](), test, size, count)
    json.dump(outcome, sys.stdout)


if __name__ == "__main__":
    main()
