"""trouterd: serve, check and print a configuration, train router heads, show the demo. `trouterd --help` imports nothing heavy."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trouterd import __version__, logs
from trouterd.config import Config
from trouterd.downloads import hints
from trouterd.settings import DEFAULT_FILE, ConfigError, load
from trouterd.termination import terminable
from trouterd.training import command as training
from trouterd.training.faults import TrainingError, TrainingUsageError

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_TEMPORARY = 75
EXIT_CONFIG = 78
EPILOG = """\
Exit codes: 0 done (serve: drained), 1 failed or forced to stop, 2 wrong usage, 75 an address is in use by another
process, 78 the configuration, a model or the prompts are at fault. 75 and 78 are EX_TEMPFAIL and EX_CONFIG of sysexits.h."""
_SERVE = """\
SIGTERM or SIGINT finishes running answers and ends it; SIGHUP reads the live keys of the configuration again."""
_CHECK = """\
Looks at the configuration, at models' directories and the headers of their weights, at tokenizers, algorithms and their
checkpoints, and at GPUs; says of models that are served by slower code why. Prints "ok" if a daemon could start."""
_CONFIG = """\
Prints every key with its value, meaning, default and range: the file's, the environment's and those of --set. Without a file it
prints the defaults."""
_TRAIN = """\
Both models answer PROMPTS, each place of the answers is labelled by whether the small model's token would do, and the head learns
from these labels. Writes a checkpoint for the algorithm, and beside it a report with thresholds by share of the large model.
Labels are kept, so that a run that is broken off can be taken up again."""
_CALIBRATE = """\
The pair answers PROMPTS at several thresholds of the route's algorithm, and the one that comes nearest to the share is printed."""
_DEMO = """\
Needs no configuration and no GPU. Prints some answers with what either model wrote of them, and a table of the small model, the
route and the large model; takes a minute or two, and leaves nothing behind."""
DEMO_CONFIG = """\
[models.small]
path = "builtin:small"

[models.large]
path = "builtin:large"

[routes.demo]
models = ["small", "large"]
algorithm = "entropy"
params = { threshold = 0.2 }
"""


class ForeignPackageError(Exception):
    """A package of one of our generic names comes from somebody else."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `trouterd`; returns the exit code."""
    options = _parser().parse_args(argv)
    try:
        _require_own_packages()
        code: int = options.run(options)
        return code
    except ConfigError as error:
        file = getattr(options, "config", None) or Path(DEFAULT_FILE)
        return _complain([*error.problems, *hints(file, error.problems)], EXIT_CONFIG)
    except TrainingUsageError as error:
        return _complain([f"error: {error}"], EXIT_USAGE)
    except TrainingError as error:
        return _complain([str(error)], EXIT_CONFIG)
    except ForeignPackageError as error:
        return _complain([str(error)], EXIT_FAILURE)
    except KeyboardInterrupt:
        return EXIT_FAILURE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trouterd",
        description="Serves several language models behind one OpenAI-compatible endpoint and lets every token of an "
        "answer come from the model that should write it.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"trouterd {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, text: str, more: str = "", epilog: str = "") -> argparse.ArgumentParser:
        shape = argparse.RawDescriptionHelpFormatter
        return commands.add_parser(
            name, help=text, description=_sentence(text, more), epilog=epilog, formatter_class=shape
        )

    serve = add("serve", "run the daemon in the foreground", _SERVE, EPILOG)
    _add_configuration(serve)
    serve.add_argument("--socket", metavar="PATH", help="unix socket of the HTTP API ('' for none)")
    serve.add_argument("--listen", metavar="HOST:PORT", help="TCP address of the HTTP API")
    serve.add_argument("--control", metavar="PATH", help="control socket of trouterctl")
    # For scripts that start a daemon (`trouterd.daemon`): drain when that process ends, however it does.
    serve.add_argument("--parent", type=int, default=0, help=argparse.SUPPRESS)
    serve.set_defaults(run=_serve)

    check = add("check", "look for mistakes in the configuration, without loading weights", _CHECK, EPILOG)
    _add_configuration(check)
    check.set_defaults(run=_check)

    config = add("config", "print the effective configuration, with every key documented", _CONFIG)
    _add_configuration(config)
    config.set_defaults(run=_config)

    version = add("version", "print the version")
    version.set_defaults(run=_version)

    _add_training(add)

    demo = add("demo", "start a daemon on the built-in pair of models and show what routing does", _DEMO)
    demo.set_defaults(run=_demo)
    return parser


def _add_training(add: Callable[..., argparse.ArgumentParser]) -> None:
    train = add("train", "train a router head for two models", _TRAIN, training.EPILOG)
    _add_configuration(train)
    training.add_train(train)
    train.set_defaults(run=_train)

    calibrate = add("calibrate", "find a route's threshold for a share of the large model", _CALIBRATE, training.EPILOG)
    _add_configuration(calibrate)
    training.add_calibrate(calibrate)
    calibrate.set_defaults(run=_calibrate)


def _sentence(text: str, more: str) -> str:
    first = f"{text[0].upper()}{text[1:]}."
    return f"{first}\n\n{more}" if more else first


def _add_configuration(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-c", "--config", type=Path, metavar="FILE", help=f"configuration (default: {DEFAULT_FILE} in this folder)"
    )
    parser.add_argument(
        "--set",
        action="append",
        type=_pair,
        default=[],
        metavar="KEY=VALUE",
        help="override a key, such as models.small.threads=2; may be given several times",
    )


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE, got {text!r}")
    return key, value


def _load(
    options: argparse.Namespace,
    *,
    check: bool = True,
    need_file: bool = True,
    given: Mapping[str, Any] | None = None,
) -> Config:
    """The configuration; `given` is what the command itself sets, in place of a file."""
    path: Path | None = options.config
    if path is None and given is None and Path(DEFAULT_FILE).is_file():
        path = Path(DEFAULT_FILE)
    if path is None and need_file and given is None:
        raise ConfigError([f"no {DEFAULT_FILE} in {Path.cwd()}; name one with -c FILE (or try: trouterd demo)"])
    overrides = list(options.set)
    for flag in ("socket", "listen", "control"):
        if getattr(options, flag, None) is not None:
            overrides.append((f"server.{flag}", getattr(options, flag)))
    return load(path, os.environ, overrides, check=check, given=given)


def _serve(options: argparse.Namespace) -> int:
    try:
        with terminable():
            return _supervise(options)
    except KeyboardInterrupt:
        return EXIT_OK  # nothing was opened: the supervisor takes signals itself, before it opens anything


def _supervise(options: argparse.Namespace) -> int:
    from ipc.errors import SegmentError
    from trouterd.supervisor.sockets import AddressError, SocketError, SocketInUseError
    from trouterd.supervisor.supervisor import Supervisor

    config = _load(options)
    logs.setup("supervisor", config.server.log_level, config.server.log_format)

    async def run() -> int:
        return await Supervisor(config, reload=lambda: _load(options), parent=options.parent).run()

    try:
        return asyncio.run(run())
    except SocketInUseError as error:
        return _complain([str(error)], EXIT_TEMPORARY)
    except AddressError as error:
        return _complain([str(error)], EXIT_CONFIG)
    except (SocketError, SegmentError) as error:
        return _complain([str(error)], EXIT_FAILURE)


def _check(options: argparse.Namespace) -> int:
    config = _load(options)
    from trouterd.check import deep_problems, remarks  # after the cheap checks: this one imports torch

    problems = deep_problems(config)
    sys.stdout.writelines(f"{remark}\n" for remark in remarks(config))
    if problems:
        raise ConfigError(problems)
    sys.stdout.write(f"ok: {_count(len(config.models), 'model')}, {_count(len(config.routes), 'route')}\n")
    return EXIT_OK


def _config(options: argparse.Namespace) -> int:
    from trouterd.config_dump import dump

    sys.stdout.write(dump(_load(options, check=False, need_file=False)))
    return EXIT_OK


def _version(options: argparse.Namespace) -> int:
    del options
    sys.stdout.write(f"trouterd {__version__}\n")
    return EXIT_OK


def _train(options: argparse.Namespace) -> int:
    training.train(options, lambda given: _load(options, given=given))
    return EXIT_OK


def _calibrate(options: argparse.Namespace) -> int:
    training.calibrate(options, _load(options))
    return EXIT_OK


def _demo(options: argparse.Namespace) -> int:
    del options
    from trouterd.daemon import Daemon, DaemonError
    from trouterd.demo.show import run_demo

    with terminable(), tempfile.TemporaryDirectory(prefix="trouterd-demo-") as folder:
        path, api = Path(folder) / DEFAULT_FILE, Path(folder) / "trouterd.sock"
        path.write_text(DEMO_CONFIG, encoding="utf-8")
        # Named as flags: variables of the environment may name the sockets of another daemon.
        sockets = ["--socket", str(api), "--listen", "", "--control", str(api.with_suffix(".ctl"))]
        try:
            with Daemon(["-c", str(path), *sockets, "--set", "server.log_level=warning"]):
                return run_demo(api)
        except DaemonError as error:
            return _complain([str(error)], EXIT_FAILURE)


def _require_own_packages() -> None:
    """Our top-level packages have plain names; another distribution's package of the same name would break us silently.

    Raises:
        ForeignPackageError: naming the package and where it comes from.
    """
    home = Path(__file__).resolve().parent.parent
    for name in ("ipc", "models", "algorithms"):
        spec = importlib.util.find_spec(name)
        origin = Path(spec.origin).resolve() if spec and spec.origin else None
        if origin is None or origin.parent.parent != home:
            raise ForeignPackageError(
                f"the package '{name}' comes from {origin.parent if origin else 'nowhere'}, not from {home}; "
                "install trouterd into an environment of its own"
            )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _complain(problems: Sequence[str], code: int) -> int:
    for problem in problems:
        sys.stderr.write(f"trouterd: {problem}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
