"""Std. Serving: token routing on servers that know nothing of it, which is what one would build without trouterd.

A server per model, and a dispatcher outside of them (`bench.dispatcher`) that asks one of them for one token, decides who writes
next, and sends the whole text to that one as a new request. The servers are trouterds of a single model each, with prefix cache,
graphs and everything else that this engine has, so that the distance to a routed trouterd is what routing inside of it is worth,
and not what its kernels are. A request is admitted, matched and prefilled anew for each of its tokens: up to a page of them, since
prefix caches keep whole pages.

Servers that share a GPU get MPS and the same shares of it that the models of one daemon get; only their KV pools they cannot agree
on, so that each needs `kv_tokens` in its settings.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec

from bench.child import child
from bench.daemon import running
from bench.deployment import READY_TIMEOUT, Deployment, Fleet, RouteSpec, fleet_of
from bench.fetch import UNIX, fetch
from bench.mps import sharing
from bench.target import Counters, ModelCounters, Target
from trouterd.config import Config, Model
from trouterd.config_dump import dump
from trouterd.consistency import live_problems
from trouterd.settings import load
from trouterd.worker.engine import kernel_share
from trouterd.worker.gpu_check import Host, may_use_megakernel

_DISPATCHER_READY = 120.0
"""Seconds that a dispatcher gets to load tokenizers."""


class DispatcherError(Exception):
    """The dispatcher did not start; it has said why on standard error."""


@contextmanager
def std_serving(
    deployment: Deployment, folder: Path, *, ready_timeout: float = READY_TIMEOUT
) -> Iterator[dict[str, Target]]:
    """A server of each model and one dispatcher; a target for each route of the deployment, by its name.

    Args:
        deployment: routes must be decided by positions and draws alone (`bench.blind_routes`).
        folder: for files and sockets, whose paths may have 107 bytes.
        ready_timeout: seconds, of each server.

    Raises:
        trouterd.daemon.DaemonError, DispatcherError: one of them did not start.
        ValueError: models share a GPU and have no `kv_tokens`, or one says `megakernel = "on"` and cannot have it.
    """
    file = _write(deployment, folder)
    config, host = load(file, os.environ), Host.this()
    alone = {name: _alone(name, config, host) for name in config.models}
    with ExitStack() as stack:
        variables = stack.enter_context(sharing(config, folder))
        starts = [
            _server(deployment, name, text, folder / f"server-{number}", ready_timeout, variables[name])
            for number, (name, text) in enumerate(alone.items())
        ]
        yield stack.enter_context(_dispatching(deployment, _entered(stack, starts), file))


@contextmanager
def std_serving_on(
    fleet: Fleet, folder: Path, routes: Sequence[RouteSpec] | None = None
) -> Iterator[dict[str, Target]]:
    """The same on the models of a daemon that runs already, for windows beside its routed ones without another start.

    One daemon stands for all servers then, and launches eagerly meanwhile, as servers do that know nothing of each other. Its one
    api process takes every call: more of its time than the dispatcher takes of its own, so that it is the limit where many
    streams or fast models make it one.

    Args:
        fleet: its models must have their prefix caches.
        folder: for files and the dispatcher's socket.
        routes: in place of the fleet's own, whose algorithms may look at more than a dispatcher sees.

    Raises:
        DispatcherError: it did not start.
        ValueError: a model has no prefix cache.
    """
    deployment = fleet.deployment if routes is None else replace(fleet.deployment, routes=tuple(routes))
    file = _write(deployment, folder)
    for name, model in load(file, os.environ).models.items():
        if not model.prefix_cache:
            raise ValueError(f"models.{name}.prefix_cache is off: every token would prefill the whole text")
    with fleet.holding({"batching.mode": "eager"}), _dispatching(deployment, [fleet], file) as targets:
        yield targets


def _write(deployment: Deployment, folder: Path) -> Path:
    """The configuration that the dispatcher reads."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "dispatcher.toml"
    file.write_text(deployment.configuration(folder))
    return file


def _alone(name: str, config: Config, host: Host) -> str:
    """The configuration of a server that has this model only."""
    model = msgspec.structs.replace(config.models[name], prefix_cache=True)
    has_kernel = may_use_megakernel(name, config, host)
    if model.gpus and not has_kernel:
        # What rules it out, other models or the routes that visit this one, is nothing that the server knows of.
        model = msgspec.structs.replace(model, megakernel="off")
    sharers = [other for gpu in model.gpus for other in config.sharing(gpu)]
    if set(sharers) - {name}:
        if not model.kv_tokens:
            raise ValueError(
                f"models.{name}.kv_tokens: the servers of {' and '.join(dict.fromkeys(sharers))} share a GPU and cannot agree on"
                " their KV pools: give each a number of tokens"
            )
        if has_kernel:
            model = _sharing_kernel(name, model, config)
    batching = msgspec.structs.replace(config.batching, mode="eager")
    return dump(msgspec.structs.replace(config, models={name: model}, routes={}, batching=batching))


def _sharing_kernel(name: str, model: Model, config: Config) -> Model:
    """The persistent kernel on the part of the GPU that it has in a daemon of all of its models that run side by side, as servers
    of their own do."""
    sharers = {other: config.models[other] for other in config.sharing(model.gpus[0])}
    batching = msgspec.structs.replace(config.batching, overlap=True)
    together = msgspec.structs.replace(config, models=sharers, routes={}, batching=batching)
    if live_problems(together):
        asked = [other for other, one in sharers.items() if one.megakernel == "on"]
        raise ValueError(
            f"models.{name}.megakernel: servers of their own take no turns; divide the GPU of {' and '.join(asked)}"
            " (megakernel_percent), or set one to 'off'"
        )
    return msgspec.structs.replace(model, megakernel_percent=round(100 * kernel_share(name, together)))


@contextmanager
def _server(
    deployment: Deployment, name: str, config: str, folder: Path, ready_timeout: float, variables: Mapping[str, str]
) -> Iterator[Fleet]:
    """A server of one model."""
    folder.mkdir(exist_ok=True)
    alone = replace(deployment, models=(deployment.model(name),), routes=())
    with ExitStack() as stack:
        daemon = running(folder, config, ready_timeout=ready_timeout, variables=variables)
        yield stack.enter_context(fleet_of(alone, stack.enter_context(daemon)))


def _entered(stack: ExitStack, fleets: Sequence[AbstractContextManager[Fleet]]) -> list[Fleet]:
    """All of them, started side by side: a large model takes half a minute."""
    with ThreadPoolExecutor(len(fleets)) as pool:
        starts = [pool.submit(stack.enter_context, fleet) for fleet in fleets]
    return [start.result() for start in starts]


@contextmanager
def _dispatching(deployment: Deployment, fleets: Sequence[Fleet], file: Path) -> Iterator[dict[str, Target]]:
    """A dispatcher over the models of these daemons."""
    homes = {model.name: fleet for fleet in fleets for model in fleet.deployment.models}
    socket = file.with_name("std.sock")
    with _process(file, socket, {name: fleet.served.socket for name, fleet in homes.items()}):
        yield {route.name: _target(deployment, route, homes, socket) for route in deployment.routes}


@contextmanager
def _process(file: Path, socket: Path, servers: Mapping[str, Path]) -> Iterator[None]:
    """The dispatcher, ready; ended with its standard input."""
    arguments = [
        f"--config={file}",
        f"--socket={socket}",
        *(f"--server={name}={path}" for name, path in servers.items()),
    ]
    with child("bench.dispatcher", *arguments) as process:
        _wait_ready(process)
        yield


def _wait_ready(process: subprocess.Popen[str]) -> None:
    if process.stdout is None:
        raise RuntimeError("the dispatcher was started without a pipe")
    heard, _, _ = select.select([process.stdout], [], [], _DISPATCHER_READY)
    if not heard:
        raise DispatcherError(f"the dispatcher was not ready within {_DISPATCHER_READY:g} s")
    if not process.stdout.readline():
        raise DispatcherError(f"the dispatcher exited with code {process.wait()} before it was ready")


def _target(deployment: Deployment, route: RouteSpec, homes: Mapping[str, Fleet], socket: Path) -> Target:
    url = f"{UNIX}{socket}"

    def counters() -> Counters:
        """Steps by the servers; tokens and moves by the dispatcher: to a server a dropped token is one like any other."""
        written = json.loads(fetch(url, "/counters"))
        served = [homes[name].counters([name]) for name in route.models]
        models: dict[str, ModelCounters] = {}
        for name, one in zip(route.models, served, strict=True):
            models[name] = replace(one.models[name], **written[name])
        return Counters(now=served[0].now, models=models)

    return Target(
        name=f"std serving {route.name}",
        url=url,
        model=route.name,
        gpus=deployment.gpus(route.models),
        counters=counters,
        large=route.models[-1],
    )
