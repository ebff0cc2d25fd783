"""A load generator that costs little itself: streaming completions over a unix socket, bytes counted, only the usage parsed.

    python -m bench.load --socket PATH --model NAME --streams 64 --tokens 512 [--rounds 1] [--prompt 4]

Each stream sends its requests one after another on one connection. Prints one JSON line: tokens, seconds from the first byte sent
to the last one received, percentiles of the time to the first token and of the gaps between what came after it (milliseconds),
and the route's own usage.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import time
from typing import Any

import uvloop

END = b"data: [DONE]\n\n"


class Stream(asyncio.Protocol):
    """The receiving end of one connection; `ask` sends a request and waits for the end of its stream."""

    def __init__(self) -> None:
        self._tail = b""
        self._done: asyncio.Future[bytes] | None = None
        self._arrivals: list[float] = []
        self.first: list[float] = []
        """Seconds to the first token, per request."""
        self.gaps: list[float] = []
        """Seconds between two arrivals of tokens, of all requests."""

    def data_received(self, data: bytes) -> None:
        """Keep the end of what has come: the usage is in the last event before [DONE]."""
        self._arrivals.append(time.perf_counter())
        self._tail = (self._tail + data)[-4096:]
        if END in self._tail and self._done is not None and not self._done.done():
            self._done.set_result(self._tail)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail a request that is under way."""
        if self._done is not None and not self._done.done():
            self._done.set_exception(exc or ConnectionResetError("the daemon closed the connection"))

    async def ask(self, transport: asyncio.Transport, body: dict[str, Any]) -> dict[str, Any]:
        """Send one streaming completion; returns its usage.

        Raises:
            RuntimeError: the answer is no stream with a usage.
        """
        payload = json.dumps(body).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: trouterd\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(payload)}\r\n\r\n"
        )
        self._tail = b""
        self._done = asyncio.get_running_loop().create_future()
        self._arrivals = [time.perf_counter()]
        transport.write(head.encode() + payload)
        tail = await self._done
        self._note_arrivals()
        for event in reversed(tail.split(b"\n\n")):
            _, found, data = event.partition(b"data: ")
            if found and b'"usage":{' in data:
                usage: dict[str, Any] = json.loads(data)["usage"]
                return usage
        raise RuntimeError(f"no usage at the end of the stream: {tail[-500:]!r}")

    def _note_arrivals(self) -> None:
        # The head of the answer may come alone; the last arrival holds the end and the usage.
        moments = self._arrivals[:-1]
        if len(moments) > 1:
            self.first.append(moments[1] - moments[0])
        self.gaps += [later - sooner for sooner, later in itertools.pairwise(moments[2:])]


async def stream(socket: str, bodies: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], Stream]:
    """Run requests one after another on one connection; returns their usages, and the stream with its times."""
    transport, protocol = await asyncio.get_running_loop().create_unix_connection(Stream, socket)
    usages = [await protocol.ask(transport, body) for body in bodies]
    transport.close()
    return usages, protocol


def percentiles(seconds: list[float]) -> dict[str, float]:
    """Median, 99th percentile and largest value in milliseconds; zeros for none."""
    ordered = sorted(seconds) or [0.0]
    count = len(ordered)
    return {"p50": ordered[count // 2] * 1e3, "p99": ordered[count * 99 // 100] * 1e3, "max": ordered[-1] * 1e3}


async def load(socket: str, model: str, streams: int, tokens: int, rounds: int, prompt: int) -> dict[str, Any]:
    """Closed-loop load; returns tokens, seconds, latencies and the sums of `usage.route`."""

    def body(seed: int) -> dict[str, Any]:
        return {
            "model": model,
            "prompt": [1 + (7919 * seed + place) % 200 for place in range(prompt)],
            "max_tokens": tokens,
            "ignore_eos": True,
            "temperature": 0,
            "seed": seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    begin = time.perf_counter()
    groups = await asyncio.gather(
        *(stream(socket, [body(s * rounds + r) for r in range(rounds)]) for s in range(streams))
    )
    seconds = time.perf_counter() - begin
    usages = [usage for group, _ in groups for usage in group]
    per_model: dict[str, int] = {}
    for usage in usages:
        for name, count in usage["route"]["tokens"].items():
            per_model[name] = per_model.get(name, 0) + count
    return {
        "tokens": sum(usage["completion_tokens"] for usage in usages),
        "seconds": seconds,
        "first_ms": percentiles([moment for _, protocol in groups for moment in protocol.first]),
        "gap_ms": percentiles([gap for _, protocol in groups for gap in protocol.gaps]),
        "handoffs": sum(usage["route"]["handoffs"] for usage in usages),
        "per_model": per_model,
    }


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="bench.load", description=__doc__)
    parser.add_argument("--socket", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=4, help="ids of each prompt")
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        result = runner.run(
            load(options.socket, options.model, options.streams, options.tokens, options.rounds, options.prompt)
        )
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
