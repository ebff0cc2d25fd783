"""A load generator that costs little itself: streaming completions over a unix socket, of whose events only the usage is read.

    python -m bench.load --socket PATH --model NAME --streams 64 --tokens 512 [--rounds 1] [--prompt 4]

Each stream sends its requests one after another on one connection. Prints one JSON line: tokens, seconds from the first byte sent
to the last one received, percentiles (the 99th of 100 or more) of the time to the first token and of the gaps between what came
after it, in milliseconds, and the route's own usage. For windows in steady state see bench.throughput, which asks through the same
connections.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import uvloop

from bench.answer import Answer, Log
from bench.command_line import run_command
from bench.dialect import stream
from bench.endpoint import Address, Connection
from bench.percentiles import Percentiles

_NONE = Percentiles(0.0, 0.0, None, None)


async def _asked(address: Address, bodies: Sequence[Mapping[str, Any]], log: Log) -> list[Mapping[str, Any]]:
    """Send requests one after another on one connection; returns their usages."""
    connection = Connection(address)
    usages = []
    try:
        for body in bodies:
            answer = Answer(log)
            await stream(connection, "/v1/completions", body, answer)
            usages.append(answer.usage() or {})
    finally:
        connection.close()
    return usages


async def load(socket: str, model: str, streams: int, tokens: int, rounds: int, prompt: int) -> dict[str, Any]:
    """Closed-loop load; returns tokens, seconds, latencies and the sums of `usage.route`.

    Raises:
        EndpointError: a request was refused or failed.
    """

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

    address, log = Address.of(f"unix:{socket}"), Log(open=True)
    begin = time.perf_counter()
    groups = await asyncio.gather(
        *(_asked(address, [body(s * rounds + r) for r in range(rounds)], log) for s in range(streams))
    )
    seconds = time.perf_counter() - begin
    usages = [usage for group in groups for usage in group]
    per_model: Counter[str] = Counter()
    for usage in usages:
        per_model.update(usage["route"]["tokens"])
    return {
        "tokens": sum(usage["completion_tokens"] for usage in usages),
        "seconds": seconds,
        "first_ms": asdict(Percentiles.of(log.first) or _NONE),
        "gap_ms": asdict(Percentiles.of(log.gaps) or _NONE),
        "handoffs": sum(usage["route"]["handoffs"] for usage in usages),
        "per_model": per_model,
    }


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="bench.load", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--socket", required=True, metavar="PATH", help="unix socket of the server")
    parser.add_argument("--model", required=True, metavar="NAME", help="model or route to ask")
    parser.add_argument("--streams", type=int, default=64, metavar="N", help="connections (%(default)s)")
    parser.add_argument("--tokens", type=int, default=512, metavar="N", help="of each answer (%(default)s)")
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="requests of each stream (%(default)s)")
    parser.add_argument("--prompt", type=int, default=4, metavar="N", help="ids of each prompt (%(default)s)")
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        result = runner.run(
            load(options.socket, options.model, options.streams, options.tokens, options.rounds, options.prompt)
        )
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    run_command("bench.load", main)
