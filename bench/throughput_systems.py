"""The systems of a command line, and what can be asked of each."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.counters import over_control
from bench.daemon import Link, Served
from bench.endpoint import Address, Connection, EndpointError
from bench.target import Counters, Target


@dataclass(slots=True)
class System:
    """A server."""

    name: str
    url: str
    models: list[str] = field(default_factory=list)
    """To be measured; none: all that it lists."""
    control: Path | None = None
    """Control socket of a trouterd."""
    gpus: int = 0
    """0: as the control socket says, or one."""


def add_systems(parser: argparse.ArgumentParser) -> None:
    """Options that begin a system, and those that belong to the latest one; they are collected in `systems`."""
    group = parser.add_argument_group("systems", "each --target or --url begins one; what follows belongs to it")
    add = group.add_argument
    parser.set_defaults(systems=[])
    add(
        "--target",
        action=_Begin,
        metavar="NAME=URL",
        help="unix:/path/of.sock or http://host:port, and its name in tables",
    )
    add("--url", action=_Begin, metavar="URL", help="the same; named by its address")
    add(
        "--model", action=_Add, metavar="NAME", help="a model or route, as requests name it (all that the server lists)"
    )
    add(
        "--control",
        action=_Add,
        type=Path,
        metavar="PATH",
        help="control socket of a trouterd: its own counts, and its GPUs",
    )
    add("--gpus", action=_Add, type=int, metavar="N", help="that its models keep busy (by --control, else 1)")


class _Begin(argparse.Action):
    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        name, found, url = values.partition("=")
        if option == "--url":
            name, url = values.removeprefix("http://").removeprefix("unix:"), values
        elif not (found and name):
            parser.error(f"argument --target: expected NAME=URL, got {values!r}")
        try:
            Address.of(url)
        except ValueError as error:
            parser.error(f"argument {option}: {error}")
        # A new list: the default one is the parser's.
        namespace.systems = [*namespace.systems, System(name, url)]


class _Add(argparse.Action):
    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        if not namespace.systems:
            parser.error(f"argument {option}: comes after the --target or --url that it belongs to")
        system: System = namespace.systems[-1]
        if self.dest == "model":
            system.models.append(values)
        else:
            setattr(system, self.dest, values)


async def targets(system: System, silence: float, stack: ExitStack) -> tuple[list[Target], list[tuple[str, str]]]:
    """What is measured of a system, and what of it cannot be, with the reason.

    Args:
        system: the server.
        silence: seconds without a byte after which a request is given up.
        stack: keeps a control connection open for the targets' counters.

    Raises:
        EndpointError: it does not answer.
        RuntimeError: its control socket does not answer.
    """
    connection = Connection(Address.of(system.url), silence)
    try:
        cards = await _cards(connection, system)
    finally:
        connection.close()
    routes = {str(card["id"]): tuple(card.get("route", {}).get("models", ())) for card in cards}
    unknown = [name for name in system.models if routes and name not in routes]
    absent = f"{system.url}: serves no such model; it has {', '.join(routes)}"
    large = {models[-1] for models in routes.values() if len(models) > 1}
    control = None
    if system.control is not None:
        control = _Control(stack.enter_context(closing(Link(Served(Path(), system.control)))))
    asked = [name for name in system.models or routes if name not in unknown]
    found = [_target(system, name, routes.get(name, ()), large, control) for name in asked]
    return found, [(f"{system.name} {name}", absent) for name in unknown]


class _Control:
    """What a control socket adds."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._gpus = {model["name"]: model["gpus"] for model in link.call("models")["models"]}

    def gpus(self, models: Sequence[str]) -> int:
        """That these models are on; one on no GPU stands for one with a GPU of its own."""
        found = [self._gpus.get(model, ()) for model in models]
        return len({gpu for gpus in found for gpu in gpus}) + sum(not gpus for gpus in found)

    def counters(self, models: Sequence[str]) -> Callable[[], Counters]:
        """Totals of these models."""
        return over_control(self._link, models)


async def _cards(connection: Connection, system: System) -> Sequence[Mapping[str, Any]]:
    """Of the models that it lists; none where it lists none, but models are named."""
    try:
        listed = await connection.json("GET", "/v1/models")
        return [card for card in listed["data"] if "id" in card]
    except EndpointError as error:
        if error.status not in (404, 405, 501) or not system.models:
            raise
        return []


def _target(system: System, name: str, models: Sequence[str], large: set[str], control: _Control | None) -> Target:
    return Target(
        name=f"{system.name} {name}",
        url=system.url,
        model=name,
        gpus=system.gpus or (control.gpus(models) if control else 0) or 1,
        counters=control.counters(models) if control and models else None,
        large=models[-1] if models and models[-1] in large else "",
    )
