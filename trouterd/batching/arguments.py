"""`trouterctl batching`: its command line. Imports nothing heavy, so that trouterctl starts at once."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Part = TypeVar("Part")
Matrix = tuple[tuple[float, ...], ...]

MOST_REQUESTS = 1 << 14
"""In flight of a plan: what is printed has a threshold for each of them."""

_PLAN = """\
Predicts the throughput of delayed-batching thresholds and finds the best ones. Needs no daemon.

  trouterctl batching plan --p 0.35 --latency-ms 6.0,27.9 --concurrency 4
  trouterctl batching plan --p 0.35 --step small.json --step large.json --concurrency 16 --contention 1.5,0.35
  trouterctl batching plan --p 0.35 --step small.json --step large.json --concurrency 1,4,16,64 --placement shared,separate
  trouterctl batching plan --matrix '.5,.3,.2;.5,.3,.2;.5,.3,.2' --commit keep --latency-ms 1+.01,3+.03,8+.05 --concurrency 8
"""


def add_actions(
    parser: argparse.ArgumentParser, shared: argparse.ArgumentParser, printing: argparse.ArgumentParser
) -> None:
    """The actions of the verb. `options.local` is what one does that asks no daemon, given the parsed options; `options.changes`
    are the keys that another one sets, and their values.

    Args:
        parser: of the verb.
        shared: options of every action that asks the daemon.
        printing: options of one that asks no daemon.
    """
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    plan = actions.add_parser(
        "plan",
        help="predict throughput and find the best thresholds, without a daemon",
        description=_PLAN,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[printing],
    )
    _add_plan(plan)
    _add_changes(actions, shared)


def _add_changes(actions: argparse._SubParsersAction[argparse.ArgumentParser], shared: argparse.ArgumentParser) -> None:
    def add(action: str, text: str) -> argparse.ArgumentParser:
        return actions.add_parser(action, help=text, description=text, parents=[shared])

    add("show", "thresholds in force, launches, and what the controller knows")
    pin = add("set", "give a model a list of thresholds, and go by such lists from now on")
    pin.add_argument("model", metavar="MODEL", help="its name in the configuration")
    pin.add_argument(
        "list",
        type=_list_of(_count),
        metavar="LIST",
        help="for 1, 2, ... active requests: 1,2,2,3; the last one holds beyond",
    )
    pin.set_defaults(
        changes=lambda options: [
            (f"models.{options.model}.thresholds", list(options.list)),
            ("batching.mode", "manual"),
        ]
    )
    add("auto", "let the controller choose").set_defaults(changes=lambda _: [("batching.mode", "auto")])
    add("eager", "launch whatever is ready").set_defaults(changes=lambda _: [("batching.mode", "eager")])
    linger = add("linger", "how long a ready request of a model waits for others at most")
    linger.add_argument("model", metavar="MODEL", help="its name in the configuration")
    linger.add_argument("ms", type=float, metavar="MS", help="milliseconds; 0: as measured")
    linger.set_defaults(changes=lambda options: [(f"models.{options.model}.linger_ms", options.ms)])


def _add_plan(plan: argparse.ArgumentParser) -> None:
    _add_network(plan)
    plan.add_argument(
        "--concurrency",
        type=_list_of(_requests),
        required=True,
        metavar="LIST",
        help=f"requests in flight, up to {MOST_REQUESTS}; several numbers give a row each",
    )
    _add_placement(plan)
    plan.add_argument(
        "--gpus",
        type=_list_of(_count),
        default=(),
        metavar="LIST",
        help="GPUs paid for: of the whole deployment, or of each model (one per model; one in all with contention)",
    )
    plan.add_argument("--price", type=_factor, metavar="MONEY", help="of one GPU for an hour: costs are told in it too")
    plan.add_argument(
        "--max-batch",
        type=_count,
        metavar="N",
        help="largest threshold to try; batches themselves take all that is ready",
    )
    plan.set_defaults(local=_run_plan)


def _add_network(plan: argparse.ArgumentParser) -> None:
    """Who hands over to whom, and how long steps take."""
    moves = plan.add_mutually_exclusive_group(required=True)
    moves.add_argument(
        "--p", type=_probability, metavar="P", help="two models: share of the entry's steps that hand over"
    )
    moves.add_argument(
        "--matrix", type=_matrix, metavar="ROWS", help="routing matrix: rows with ';' between, numbers with ',' between"
    )
    plan.add_argument(
        "--q",
        type=_probability,
        default=None,
        metavar="Q",
        help="with --p: share of the peer's steps that hand back (1)",
    )
    times = plan.add_mutually_exclusive_group(required=True)
    times.add_argument(
        "--latency-ms",
        type=_list_of(_latency),
        metavar="LIST",
        help="step time of each model, entry first: MS, MS+MS for what every request of a batch adds, or MS+MS+MS for what every"
        " row adds too: a visit feeds a row for each token that the model has missed",
    )
    times.add_argument(
        "--step", type=Path, action="append", metavar="FILE", help="JSON of bench.step, once per model, entry first"
    )
    plan.add_argument(
        "--context", type=_count, metavar="TOKENS", help="with --step: nearest measured context (shortest)"
    )
    plan.add_argument(
        "--commit",
        type=_commit,
        default="rewrite",
        metavar="HOW",
        help="rewrite: what the entry routes away is dropped (default); keep: every step commits; or a matrix of tokens per move",
    )


def _add_placement(plan: argparse.ArgumentParser) -> None:
    """What models do to each other, by where they are."""
    plan.add_argument(
        "--contention",
        type=_list_of(_factor),
        default=(),
        metavar="LIST",
        help="by how much each other running model prolongs a model's step; one number for all, or one per model"
        " (0: GPUs of their own; 1: time slices of one)",
    )
    plan.add_argument(
        "--turns",
        action="store_true",
        help="two models that share GPUs run one at a time (batching.overlap = false)",
    )
    plan.add_argument(
        "--placement",
        type=_list_of(_placement),
        default=(),
        metavar="LIST",
        help="shared: the models of a pair on the same GPUs under MPS, 1.5,0.35 without --contention; separate: each on its own;"
        " both give a table each",
    )
    plan.add_argument(
        "--handoff-ms",
        type=_milliseconds,
        default=0.0,
        metavar="MS",
        help="from the end of a step until a request that it handed over is ready at the receiver (0)",
    )


def _run_plan(options: argparse.Namespace) -> int:
    # Only here: numpy takes longer to import than everything else that trouterctl does.
    from trouterd.batching.command import run_plan

    return run_plan(options)


def _list_of(part: Callable[[str], Part]) -> Callable[[str], tuple[Part, ...]]:
    def parse(text: str) -> tuple[Part, ...]:
        return tuple(part(word.strip()) for word in text.split(","))

    return parse


def _number(text: str, least: float, most: float, what: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not least <= number <= most:
        raise argparse.ArgumentTypeError(f"expected {what}, got {text!r}")
    return number


def _probability(text: str) -> float:
    return _number(text, 0, 1, "a probability")


def _placement(text: str) -> str:
    if text not in ("shared", "separate"):
        raise argparse.ArgumentTypeError(f"expected shared, separate or both, got {text!r}")
    return text


def _factor(text: str) -> float:
    return _number(text, 0, 1e6, "numbers of 0 or more")


def _milliseconds(text: str) -> float:
    return _number(text, 0, 1e9, "milliseconds of 0 or more")


def _count(text: str) -> int:
    number = _number(text, 1, 1 << 20, "a whole number from 1 on")
    if number != int(number):
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 on, got {text!r}")
    return int(number)


def _requests(text: str) -> int:
    if (count := _count(text)) > MOST_REQUESTS:
        raise argparse.ArgumentTypeError(f"expected at most {MOST_REQUESTS}, got {text!r}")
    return count


def _latency(text: str) -> tuple[float, ...]:
    """Of a step, of each request, of each row; what is not said is left out."""
    base, *more = text.split("+")
    what = "milliseconds such as 6.0, 8+0.05 or 8+0.05+0.02"
    if len(more) > 2:
        raise argparse.ArgumentTypeError(f"expected {what}, got {text!r}")
    return _number(base, 1e-6, 1e9, what), *(_number(part, 0, 1e9, what) for part in more)


def _matrix(text: str) -> Matrix:
    return tuple(_list_of(_factor)(row) for row in text.split(";"))


def _commit(text: str) -> str | Matrix:
    return text if text in ("rewrite", "keep") else _matrix(text)
