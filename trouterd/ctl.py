"""trouterctl: asks the running daemon over its control socket. Imports neither torch nor an event loop: it starts at once."""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trouterd.batching.arguments import add_actions
from trouterd.control import Call, ControlError, Frame, Reply, pack_frame, receive_frame
from trouterd.table import cell, table
from trouterd.top import add_top
from trouterd.tracing.command import add_trace

EXIT_OK, EXIT_FAILURE, EXIT_USAGE, EXIT_NO_DAEMON, EXIT_REFUSED = range(5)
ANSWER_TIMEOUT = 30.0
"""Seconds that the daemon gets to answer."""

EPILOG = """\
The control socket is the one of --control, else of $TROUTERD_CONTROL, else of trouterd.toml in the working directory.
Exit codes: 0 done, 1 failed, 2 wrong usage, 3 no daemon answers on the socket, 4 refused (not live, out of range)."""


class AnswerError(Exception):
    """The daemon could not do, or refused, what a verb of several calls has asked."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply.error)
        self.code = EXIT_REFUSED if reply.refused else EXIT_FAILURE


class NoDaemonError(Exception):
    """Nobody answers on the control socket, or there is none to ask."""

    code = EXIT_NO_DAEMON


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `trouterctl`; returns the exit code."""
    defaults = argparse.Namespace(control="", json=False, wait=False, local=None, converse=None, changes=None)
    options = _parser().parse_args(argv, defaults)
    try:
        code = int(options.local(options)) if options.local is not None else _call(options)
        sys.stdout.flush()
    except (NoDaemonError, AnswerError) as error:
        return _complain(str(error), error.code)
    except ControlError as error:
        return _complain(f"the daemon did not answer: {error}", EXIT_FAILURE)
    except BrokenPipeError:  # `trouterctl status | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except KeyboardInterrupt:  # the usual end of `top`
        return EXIT_OK if options.converse is not None else EXIT_FAILURE
    return code


def _call(options: argparse.Namespace) -> int:
    """Everything that asks the daemon; returns the exit code."""
    with _connect(_control_path(options.control)) as link:
        if options.converse is not None:
            return int(options.converse(options, lambda verb, **args: _answer(_ask(link, verb, args))))
        replies = _replies(link, options)
        reply = replies[-1]
        if options.wait and not reply.error:
            link.settimeout(None)
            while _receive(link) is not None:
                pass
    if reply.error:
        return _complain(reply.error, EXIT_REFUSED if reply.refused else EXIT_FAILURE)
    printer = _PRINTERS["set" if options.changes else options.verb]
    lines = [json.dumps(reply.result)] if options.json else [line for one in replies for line in printer(one.result)]
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return EXIT_OK


def _parser() -> argparse.ArgumentParser:
    # SUPPRESS: an option may stand before or after the verb, and the later parser must not reset it.
    printing = argparse.ArgumentParser(add_help=False)
    printing.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print the answer as JSON")
    shared = argparse.ArgumentParser(add_help=False, parents=[printing])
    shared.add_argument("--control", metavar="PATH", default=argparse.SUPPRESS, help="control socket of the daemon")
    parser = argparse.ArgumentParser(
        prog="trouterctl",
        description="Look at and steer a running trouterd.",
        epilog=EPILOG,
        parents=[shared],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)

    def add(verb: str, text: str) -> argparse.ArgumentParser:
        return verbs.add_parser(verb, help=text, description=text, parents=[shared])

    add("status", "state of every process and ring, and totals")
    add("models", "models and routes that are served")
    add("requests", "requests in flight, and where each one lives; never their text")
    change = add("set", "change a live key, such as routes.demo.params.threshold or server.drain_timeout")
    change.add_argument("key", metavar="KEY", help="dotted, as 'trouterd config' prints them")
    change.add_argument(
        "value", metavar="VALUE", help="the new value; it holds until the daemon ends or reloads its file"
    )
    abort = add("abort", "end a request")
    abort.add_argument("id", metavar="ID", help="RID or ID as shown by 'requests', or the id in the answer")
    drain = add("drain", "finish what runs, take nothing new, and exit; the same as SIGTERM")
    drain.add_argument("--wait", action="store_true", default=argparse.SUPPRESS, help="return when the daemon is gone")
    add("flush-cache", "forget all cached prefixes that no request uses")
    add_actions(add("batching", "delayed batching: thresholds and what they are worth"), shared, printing)
    add_top(add("top", "batch sizes, queues and rates of every model, live"))
    add_trace(add("trace", "record a timeline of every model's steps, and print where the time went"))
    return parser


def _arguments(options: argparse.Namespace) -> dict[str, Any]:
    match options.verb:
        case "set":
            return {"key": options.key, "value": options.value}
        case "abort":
            return {"id": options.id}
    return {}


def _control_path(flag: str) -> Path:
    if given := flag or os.environ.get("TROUTERD_CONTROL", ""):
        return Path(given)
    # Only here: most calls come with a path, and need no configuration.
    from trouterd.settings import DEFAULT_FILE, ConfigError, load

    if not Path(DEFAULT_FILE).is_file():
        raise NoDaemonError(
            f"which daemon? Give --control PATH, set TROUTERD_CONTROL, or run this in a folder with a {DEFAULT_FILE}"
        )
    try:
        return Path(load(Path(DEFAULT_FILE), os.environ, check=False).server.control)
    except ConfigError as error:
        raise NoDaemonError(str(error)) from error


def _connect(path: Path) -> socket.socket:
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    link.settimeout(ANSWER_TIMEOUT)
    try:
        link.connect(str(path))
    except OSError as error:
        link.close()
        raise NoDaemonError(f"no daemon on {path}: {error.strerror or error}") from error
    return link


def _receive(link: socket.socket) -> Frame | None:
    try:
        return receive_frame(link)
    except OSError as error:
        raise ControlError(str(error)) from error


def _ask(link: socket.socket, verb: str, args: dict[str, Any]) -> Reply:
    try:
        link.sendall(pack_frame(Call(id=1, verb=verb, args=args)))
    except OSError as error:
        raise ControlError(str(error)) from error
    reply = _receive(link)
    if not isinstance(reply, Reply):
        raise ControlError("it closed the connection" if reply is None else f"it sent {type(reply).__name__}")
    return reply


def _replies(link: socket.socket, options: argparse.Namespace) -> list[Reply]:
    """Of what the options ask for: one call, or several changes of which the first refusal is the end."""
    if options.changes is None:
        return [_ask(link, options.verb, _arguments(options))]
    replies: list[Reply] = []
    for key, value in options.changes(options):
        replies.append(_ask(link, "set", {"key": key, "value": value}))
        if replies[-1].error:
            break
    return replies


def _answer(reply: Reply) -> Any:
    if reply.error:
        raise AnswerError(reply)
    return reply.result


def _complain(message: str, code: int) -> int:
    sys.stderr.write(f"trouterctl: {message}\n")
    return code


def _status_lines(status: Mapping[str, Any]) -> Iterable[str]:
    yield f"trouterd {status['version']}: {status['state']}, up {status['uptime_seconds']:.0f} s"
    yield f"listening on {' and '.join(status['addresses']) or 'nothing'}"
    yield ""
    head = ("PROCESS", "STATE", "PID", "EPOCH", "RESTARTS", "UPTIME", "MEMORY", "STEPS")
    yield from table(
        head,
        [
            (
                process["name"],
                process["state"],
                process["pid"],
                process["epoch"],
                process["restarts"],
                f"{process['uptime_seconds']:.0f} s",
                f"{process['rss_bytes'] / (1 << 20):.0f} MiB",
                process["steps"],
            )
            for process in status["processes"]
        ],
    )
    yield ""
    yield from table(
        ("RING", "FILL", "SPILLED", "SENT", "FULL"),
        [
            (
                f"{ring['from']}>{ring['to']}",
                f"{ring['fill_bytes']} B",
                ring["spill_records"],
                ring["sent"],
                ring["full_events"],
            )
            for ring in status["rings"]
        ],
    )
    for name, report in ({"api": status["api"]} | status["workers"]).items():
        yield ""
        yield f"{name}:"
        for key, value in report.items():
            if isinstance(value, Mapping):
                value = ", ".join(f"{part} {cell(number)}" for part, number in value.items()) or "-"
            if value != name:  # a worker's report names its model
                yield f"  {key:<18} {cell(value)}"


def _models_lines(answer: Mapping[str, Any]) -> Iterable[str]:
    head = ("MODEL", "STATE", "DEVICE", "CONTEXT", "KV TOKENS", "PATH")
    columns = ("name", "state", "device", "context", "kv_tokens", "path")
    yield from table(head, [[model.get(column, "") for column in columns] for model in answer["models"]])
    yield ""
    rows = [
        (
            route["name"],
            " > ".join(route["models"]),
            route["algorithm"],
            ", ".join(f"{key}={value}" for key, value in route["params"].items()),
        )
        for route in answer["routes"]
    ]
    yield from table(("ROUTE", "MODELS", "ALGORITHM", "PARAMETERS"), rows)


def _requests_lines(answer: Mapping[str, Any]) -> Iterable[str]:
    for title, rows in ({"api": answer["requests"]} | answer["workers"]).items():
        if isinstance(rows, Mapping):
            yield f"{title}: {rows['error']}"
        elif rows:
            yield f"{title}:"
            yield from table([key.upper() for key in rows[0]], [list(row.values()) for row in rows])
        else:
            yield f"{title}: no request"


def _set_lines(answer: Mapping[str, Any]) -> Iterable[str]:
    old = "unset" if answer["old"] is None else answer["old"]
    yield f"{answer['key']}: {old} -> {answer['new']}"
    if answer["pending"]:
        yield f"not answered yet by {', '.join(answer['pending'])}"


def _abort_lines(answer: Mapping[str, Any]) -> Iterable[str]:
    yield f"aborted {answer['aborted']}"


def _drain_lines(answer: Mapping[str, Any]) -> Iterable[str]:
    yield f"draining for at most {answer['drain_timeout']:g} s"


def _flush_lines(answer: Mapping[str, Any]) -> Iterable[str]:
    for name, pages in answer.items():
        yield f"{name}: {pages['error'] if isinstance(pages, Mapping) else f'{pages} pages freed'}"


def _batching_lines(answer: Mapping[str, Any]) -> Iterable[str]:
    rows = [
        (
            name,
            model["mode"],
            model["active"],
            model["threshold"],
            f"{model['linger_ms']:.1f}",
            ", ".join(f"{reason} {count}" for reason, count in model["reasons"].items()) or "-",
            ",".join(map(str, model["thresholds"])) or "1",
        )
        for name, model in answer["models"].items()
        if "error" not in model
    ]
    yield from table(("MODEL", "MODE", "ACTIVE", "B", "LINGER MS", "LAUNCHES BY", "LIST"), rows)
    yield from (f"{name}: {model['error']}" for name, model in answer["models"].items() if "error" in model)
    if "error" in answer["controller"]:
        yield f"controller: {answer['controller']['error']}"
    for group in answer["controller"].get("groups", ()):
        yield ""
        yield f"{' > '.join(group['models'])}: {group['state']}"
        predicted, ideal = (f"{group[key]:.1f}" if group[key] else "-" for key in ("predicted", "ideal"))
        yield (
            f"  token/s: measured {group['measured']:.1f}, predicted {predicted}, ideal {ideal}"
            f" at {group['active']:.1f} active requests"
        )
        for name, row in group["routing"].items():
            moves = ", ".join(f"{to} {share:.3f}" for to, share in zip(group["routing"], row, strict=True))
            step, contention = group["step_ms"][name], group["contention"][name]
            yield f"  {name}: step {step:.2f} ms; goes on to {moves}; contention {contention:.2f}"
        if group["routing"]:
            yield f"  hand-off {group['handoff_ms']:.2f} ms; waiting has reached {group['trust']:.0%} of what was promised"


_PRINTERS: dict[str, Callable[[Any], Iterable[str]]] = {
    "status": _status_lines,
    "models": _models_lines,
    "requests": _requests_lines,
    "set": _set_lines,
    "abort": _abort_lines,
    "drain": _drain_lines,
    "flush-cache": _flush_lines,
    "batching": _batching_lines,
}


if __name__ == "__main__":
    sys.exit(main())
