"""Step time of a model split over GPUs, by how its ranks sum.

    python -m bench.split [--ranks 2] [--layers 64] [--batches 1,8,32] [--context 1024] [--ways chosen,nccl] [--json FILE]

Qwen3-32B's shape with random weights. Each step is one graph replay of the model without sampling: rows from the first rank to
the others, the layers, the LM head's parts back to the first rank. Ways: as a worker does it (`chosen`), without overlapping small
kernels, NCCL and a norm, torch's one-shot sum and a norm, no sums at all (wrong, but it shows what they cost), and neither sums nor
gathered logits. Besides the step's time: how long the host is in a replay while one step is under way, as in a worker, and how many
replays it can queue before one makes it wait for the device. Last comes where one step's time goes on the first rank.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from bench.command_line import run_command, whole_numbers
from bench.split_steps import PAGE, SLOTS, Times, capture, measure, profile
from bench.step_shapes import write_shape
from models.cuda.decoder import CudaDecoder
from models.cuda.kernels.overlap import can_overlap
from models.cuda.shard import FusedSums, Shard
from models.parallel.leader import LeadingDecoder, SplitModel
from models.parallel.link import Load
from trouterd import logs
from trouterd.worker.rank import main as follow
from trouterd.worker.rank_processes import RankProcesses

WAYS = ("chosen", "no overlap", "nccl", "one-shot", "no sums", "no logits")


class Ways:
    """A rank's shard whose sums are made in the way whose turn it is."""

    def __init__(self, shard: Shard) -> None:
        self.way = WAYS[0]
        self._shard = shard
        self._buffer: torch.Tensor | None = None

    def shard(self) -> Shard:
        """The shard for the decoder."""
        return replace(self._shard, all_reduce=self._all_reduce, all_gather=self._gather, fused=self._fused)

    def _fused(self, rows: int) -> FusedSums | None:
        return self._shard.fused(rows) if self.way in ("chosen", "no overlap") else None

    def _all_reduce(self, partial: torch.Tensor) -> None:
        if self.way == "one-shot":
            self._one_shot(partial)
        elif self.way not in ("no sums", "no logits"):
            self._shard.all_reduce(partial)

    def _gather(self, local: torch.Tensor) -> torch.Tensor:
        return local if self.way == "no logits" else self._shard.all_gather(local)

    def _one_shot(self, partial: torch.Tensor) -> None:
        from torch.distributed import _symmetric_memory as symmetric

        if self._buffer is None:
            self._buffer = symmetric.empty(SLOTS * partial.shape[1], dtype=partial.dtype, device=partial.device)
            symmetric.rendezvous(self._buffer, dist.group.WORLD)  # type: ignore[arg-type]
        place = self._buffer[: partial.numel()].view_as(partial)
        name = dist.group.WORLD.group_name  # type: ignore[union-attr]
        torch.ops.symm_mem.one_shot_all_reduce_copy_out(place, partial, "sum", name, partial)


class Part(CudaDecoder):
    """Takes another way with every `allocate_kv`, which all ranks do together: the number of pages says which."""

    ways: Ways

    def allocate_kv(self, num_pages: int) -> None:
        """Make room for K and V; graphs of before are gone."""
        super().allocate_kv(num_pages)
        self.ways.way = WAYS[num_pages % len(WAYS)]
        self.overlap = can_overlap(self.device) and self.ways.way != "no overlap"


def load(order: Load, shard: Shard) -> Part:
    """A rank's part."""
    ways = Ways(shard)
    part = cast(
        "Part",
        Part.load(
            order.path,
            device=order.device,
            dtype=order.dtype,
            load_format=order.load_format,
            page_size=order.page_size,
            shard=ways.shard(),
        ),
    )
    part.ways = ways
    return part


def attempt(what: str, work: Callable[[], Any]) -> Any:
    """The result, or None and a line that says why not; after a fault of the device, which nothing can use any more, the end."""
    try:
        return work()
    except (RuntimeError, AttributeError) as error:
        print(f"{what}: {type(error).__name__}: {' '.join(str(error).split())[:300]}", flush=True)
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        print("the device has failed", flush=True)
        os._exit(1)
    return None


def timed(leader: LeadingDecoder, way: str, batch: int, context: int) -> Times:
    """Capture and measure."""
    step = capture(leader, batch, context)
    times = measure(leader, step)
    print(
        f"{way:12} b {batch:3}: {times.step:7.3f} ms, host {times.launch * 1e3:5.0f} us, at most {times.longest * 1e3:5.0f},"
        f" {times.ahead} ahead, finite {bool(step.logits.isfinite().all())}",
        flush=True,
    )
    return times


def kernels(leader: LeadingDecoder, batch: int, context: int) -> None:
    """Print a step's kernels."""
    print(f"\nkernels of a step of {batch} rows")
    for key, count, spent in profile(leader, capture(leader, batch, context))[:24]:
        print(f"    {spent:8.1f} us {count:5} x {key[:90]}", flush=True)


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All ways and batches."""
    write_shape("Qwen3-32B", folder, options.layers)
    devices = tuple(f"cuda:{rank}" for rank in range(options.ranks))
    model = SplitModel(str(folder), devices, load_format="dummy", page_size=PAGE)
    processes = RankProcesses(
        "bench", options.ranks, log_level="info", log_format="text", on_loss=print, module="bench.split"
    )
    started = time.perf_counter()
    leader = LeadingDecoder(model, processes.ranks, load)
    print(f"loaded in {time.perf_counter() - started:.1f} s, {leader.weight_bytes / 2**30:.2f} GiB a rank", flush=True)
    steps: dict[str, dict[int, Times]] = {}
    pages = SLOTS * -(-options.context // PAGE)
    pages += -pages % len(WAYS)
    with torch.inference_mode():
        for way in options.ways:
            leader.allocate_kv(pages + WAYS.index(way))
            for batch in options.batches:
                times = attempt(f"{way}, {batch} rows", partial(timed, leader, way, batch, options.context))
                if times is not None:
                    steps.setdefault(way, {})[batch] = times
        table(
            {way: {batch: times.step for batch, times in line.items()} for way, line in steps.items()}, options.batches
        )
        leader.allocate_kv(pages)
        for batch in options.profile:
            attempt("profile", partial(kernels, leader, batch, options.context))
    leader.close()
    processes.close()
    found = {way: {batch: asdict(times) for batch, times in line.items()} for way, line in steps.items()}
    return {"ranks": options.ranks, "layers": options.layers, "steps": found}


def table(steps: dict[str, dict[int, float]], batches: Sequence[int]) -> None:
    """All steps, and what the sums cost."""
    print("\nms a step             " + "".join(f"{f'b {batch}':>10}" for batch in batches))
    for way, line in steps.items():
        print(f"{way:22}" + "".join(f"{line.get(batch, float('nan')):10.3f}" for batch in batches))
    without = steps.get("no sums", {})
    for way in [way for way in steps if way not in ("no sums", "no logits")] if without else []:
        shares = [1 - without.get(batch, float("nan")) / steps[way].get(batch, float("nan")) for batch in batches]
        print(f"share of sums, {way:7}" + "".join(f"{share:10.1%}" for share in shares))


def _ways(text: str) -> list[str]:
    if unknown := set(text.split(",")) - set(WAYS):
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: known are {', '.join(WAYS)}")
    return text.split(",")


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        prog="bench.split", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="GPUs (%(default)s)")
    parser.add_argument("--layers", type=int, default=64, metavar="N", help="of the model (%(default)s)")
    parser.add_argument("--context", type=int, default=1024, metavar="TOKENS", help="of each row (%(default)s)")
    parser.add_argument(
        "--batches", type=whole_numbers, default="1,8,32", metavar="LIST", help="rows of a step (%(default)s)"
    )
    parser.add_argument(
        "--profile",
        type=whole_numbers,
        default="8",
        metavar="LIST",
        help="batches whose kernels are listed (%(default)s)",
    )
    parser.add_argument(
        "--ways", type=_ways, default=list(WAYS), metavar="LIST", help=f"how ranks sum ({','.join(WAYS)})"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    options = parser.parse_args()
    logs.setup("bench", "info", "text")
    logging.captureWarnings(False)
    with tempfile.TemporaryDirectory() as folder:
        result = run(options, Path(folder))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    if "--link-fd" in sys.argv:
        follow(load=load)
    run_command("bench.split", main)
