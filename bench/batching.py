"""The throughput model of delayed batching: against its simulator, and how long a plan takes.

    python -m bench.batching [--requests 1,4,16,64] [--steps 40000] [--markdown FILE]
    python -m bench.batching --daemon [--requests 4,8,16] [--step-ms 6,28] [--seconds 8] [--markdown FILE] [--plots FOLDER]

Without --daemon nothing is served: step times are those of Qwen3-0.6B with the R2R router and of Qwen3-32B on one H200
(docs/performance.md), hand-over rates are typical ones of each algorithm. Compare the two columns of the model and of the simulator
with each other, and both with a measurement of the daemon, which --daemon makes (bench.delayed).
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from bench.command_line import run_command, whole_numbers
from bench.delayed import PATTERNS, Settings, measure
from bench.delayed_report import markdown, plots
from bench.frontier_fault import FrontierError
from bench.frontier_plot import require_matplotlib
from trouterd.batching.bound import ideal
from trouterd.batching.network import Network, StepTime
from trouterd.batching.plan import plan
from trouterd.batching.policies import constant
from trouterd.batching.predictor import Predictor
from trouterd.batching.search import search
from trouterd.batching.simulator import Outcome, simulate
from trouterd.batching.workload import MarkovWorkload

_MS = 1e-3
SMALL = StepTime(
    tuple((rows, ms * _MS) for rows, ms in ((1, 0.908), (4, 0.950), (8, 1.010), (16, 1.123), (32, 1.748), (64, 2.220)))
)
LARGE = StepTime(((1, 14.880 * _MS), (8, 15.148 * _MS)))
MOVES = {
    "CITER": (0.135, 1.0),
    "R2R, rarely": (0.10, 1.0),
    "R2R": (0.35, 1.0),
    "Co-LLM": (0.54, 1.0),
    "R-Stitch": (0.347, 0.177),
}
"""Probabilities that a step of the small model hands over, and that one of the large model hands back."""
PLACES = {"two GPUs": (0.0, 0.0), "one GPU, MPS": (1.8, 0.06), "one GPU, time slices": (1.0, 1.0)}
"""Contention of the small and of the large model."""
REQUESTS = (1, 4, 16, 64)
DAEMON_REQUESTS = (4, 8, 16)
_LISTED = 256
_REPEATS = 5
_SEED = 0


def main(argv: Sequence[str] | None = None) -> int:
    """Compute, print, write."""
    parser = _parser()
    options = parser.parse_args(argv)
    if problem := _problem(options):
        parser.error(problem)
    if options.daemon:
        given = options.requests or DAEMON_REQUESTS
        wanted = (options.seconds, options.step_ms, options.repeats, options.patterns, options.others)
        measured = measure(Settings(given, *wanted))
        lines = list(markdown(measured))
        if options.plots:
            lines += ["", *(f"![]({path.name})" for path in plots(measured, options.plots))]
    else:
        lines = [*_against_simulator(options.requests or REQUESTS, options.steps), "", *_times()]
    report = "\n".join(lines) + "\n"
    print(report, end="")
    if options.markdown:
        options.markdown.write_text(report)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.batching", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--requests", type=whole_numbers, metavar="LIST", help="in flight (1,4,16,64; with --daemon 4,8,16)"
    )
    parser.add_argument("--daemon", action="store_true", help="measure a daemon with scripted step times")
    parser.add_argument(
        "--step-ms", type=_times_ms, default="6,28", metavar="SMALL,LARGE", help="of its models (%(default)s)"
    )
    parser.add_argument("--seconds", type=float, default=8.0, metavar="S", help="of each of its measurements (8)")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="windows of each kind (3)")
    parser.add_argument(
        "--patterns", type=_patterns, default=PATTERNS, metavar="LIST", help=f"of runs, or none ({','.join(PATTERNS)})"
    )
    parser.add_argument(
        "--others", type=float, default=0.1, metavar="CPUS", help="that other programs may use meanwhile (0.1)"
    )
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="of its report, as PNG files (needs matplotlib)")
    parser.add_argument(
        "--steps", type=int, default=40_000, metavar="N", help="of a simulation, all requests together (40000)"
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables here too")
    return parser


def _problem(options: argparse.Namespace) -> str:
    """What would end a measurement, or its report after minutes; '' if nothing."""
    if options.steps < 1:
        return "--steps: a number from 1 on"
    if not (0 < options.seconds < math.inf and all(0 < ms < math.inf for ms in options.step_ms)):
        return "--seconds, --step-ms: times above 0"
    if options.repeats < 1 or not options.others >= 0:
        return "--repeats: a number from 1 on; --others: a number of 0 or more"
    if options.plots is None:
        return ""
    if not options.daemon:
        return "--plots: of what --daemon measures"
    try:
        require_matplotlib()
    except FrontierError as error:
        return str(error)
    return ""


def _times_ms(text: str) -> tuple[float, ...]:
    small, large = text.split(",")
    return float(small), float(large)


def _patterns(text: str) -> tuple[str, ...]:
    found = () if text == "none" else tuple(text.split(","))
    if unknown := set(found) - set(PATTERNS):
        raise argparse.ArgumentTypeError(f"unknown patterns {sorted(unknown)}")
    return found


def _against_simulator(requests: Sequence[int], steps: int) -> Iterable[str]:
    head = (
        "load",
        "placement",
        "requests",
        "B small, large",
        "token/s",
        "simulated",
        "eager",
        "x eager",
        "x large alone",
        "of ideal",
    )
    yield f"| {' | '.join(head)} |"
    yield "|---|---" + "|---:" * (len(head) - 2) + "|"
    errors: list[float] = []
    for load, (there, back) in MOVES.items():
        for place, contention in PLACES.items():
            network = Network.pair((SMALL, LARGE), there, back, contention=contention)
            for count in requests:
                predictor = Predictor(network, count)
                found = search(predictor, count)
                outcome = _run(network, found.thresholds, count, steps)
                eager = _run(network, (1, 1), count, steps)
                predicted = found.steps_per_second * network.tokens_per_step
                errors += [
                    predicted / outcome.tokens_per_second - 1,
                    found.eager_steps_per_second / eager.steps_per_second - 1,
                ]
                cells = (
                    load,
                    place,
                    count,
                    ", ".join(map(str, found.thresholds)),
                    f"{predicted:,.0f}",
                    f"{outcome.tokens_per_second:,.0f}",
                    f"{eager.tokens_per_second:,.0f}",
                    f"{outcome.tokens_per_second / eager.tokens_per_second:.2f}",
                    f"{outcome.tokens_per_second * LARGE.of(count) / count:.2f}",
                    f"{outcome.steps_per_second / ideal(network, count):.2f}",
                )
                yield f"| {' | '.join(map(str, cells))} |"
    sizes = sorted(map(abs, errors))
    yield ""
    yield f"Model against simulator, best and eager thresholds: mean error {sum(sizes) / len(sizes):.1%}, largest {sizes[-1]:.1%}."


def _run(network: Network, thresholds: Sequence[int], requests: int, steps: int) -> Outcome:
    return simulate(network, constant(thresholds), MarkovWorkload(network.routing, requests, _SEED), steps)


def _times() -> Iterable[str]:
    yield f"| lists for 1 to {_LISTED} requests | CPU ms, fastest of {_REPEATS} |"
    yield "|---|---:|"
    for place, contention in PLACES.items():
        network = Network.pair((SMALL, LARGE), *MOVES["R2R"], contention=contention)
        seconds = []
        for _ in range(_REPEATS):
            started = time.process_time()
            plan(network, _LISTED)
            seconds.append(time.process_time() - started)
        yield f"| R2R, {place} | {1e3 * min(seconds):.0f} |"


if __name__ == "__main__":
    run_command("bench.batching", main)
