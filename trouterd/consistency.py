"""What must hold between the keys of a configuration and the files that it names; imports nothing heavy.

Whether algorithms take their parameters and tokenizers agree needs those packages: see `trouterd.check`.
"""

from __future__ import annotations

import grp
import re
from collections.abc import Callable
from pathlib import Path

from trouterd.batching.launch import feasible
from trouterd.config import Config, Model, Route
from trouterd.keys import dotted, suggestion

RESERVED_NAMES = ("api", "supervisor")
MAX_SOCKET_PATH = 107
"""Bytes of a unix socket's path (sun_path less its terminating zero)."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]*")
_DEVICE = re.compile(r"cpu|cuda(:(0|[1-9][0-9]?))?")


def absence(path: str | Path, test: Callable[[Path], bool]) -> str | None:
    """None where the test (`Path.is_file` or the like) holds of the path; else what the system adds to that, or ''."""
    try:
        return None if test(Path(path)) else ""
    except OSError as error:  # no right to look there, a name that is too long
        return f" ({error.strerror})"


def is_device(text: str) -> bool:
    """Whether models can be asked to run there, if the host has it."""
    return bool(_DEVICE.fullmatch(text))


def config_problems(config: Config) -> list[str]:
    """One line per problem, naming the key."""
    problems = _server_problems(config)
    capacity = config.rings.capacity
    if capacity & (capacity - 1):
        problems.append(f"rings.capacity: expected a power of two, got {capacity}")
    if not config.models:
        problems.append("models: no model is configured; add a table such as [models.small] with path = ...")
    for name, model in config.models.items():
        problems += _name_problems("models", name) + _model_problems(name, model)
    if all(is_device(model.device) for model in config.models.values()):
        problems += _gpu_problems(config)
    for name, route in config.routes.items():
        problems += _name_problems("routes", name) + _route_problems(name, route, config)
    return problems or threshold_problems(config)


def live_problems(config: Config) -> list[str]:
    """What a change of a live key can break, although each key is in range."""
    return threshold_problems(config) + _megakernel_problems(config)


def threshold_problems(config: Config) -> list[str]:
    """Lists of delayed batching that are never met, or with which requests could wait for each other."""
    problems = []
    for name, model in config.models.items():
        for active, threshold in enumerate(model.thresholds, start=1):
            if threshold > active:
                problems.append(
                    f"models.{name}.thresholds: {threshold} for {active} active requests, of which no more can be ready"
                )
                break
        if (most := max(model.thresholds, default=0)) > model.max_requests:
            problems.append(
                f"models.{name}.thresholds: {most} ready requests are more than models.{name}.max_requests, {model.max_requests}"
            )
    for name, route in config.routes.items():
        if not problems and (problem := _deadlock(name, route, config)):
            problems.append(problem)
    return problems


def _deadlock(name: str, route: Route, config: Config) -> str:
    lists = {model: config.models[model].thresholds for model in route.models if config.models[model].thresholds}
    for active in range(1, max(map(len, lists.values()), default=0) + 1):
        thresholds = [values[min(active, len(values)) - 1] for values in lists.values()]
        if not feasible(thresholds, active):
            given = ", ".join(f"{model} {threshold}" for model, threshold in zip(lists, thresholds, strict=True))
            return (
                f"models.{next(iter(lists))}.thresholds: with {active} active requests of route '{name}' all models could wait"
                f" at once ({given}): the thresholds less 1 must sum to less than {active}"
            )
    return ""


def parse_listen(listen: str) -> tuple[str, int]:
    """HOST and PORT of server.listen; an IPv6 address stands in brackets.

    Raises:
        ValueError: not HOST:PORT, or a port outside 0..65535.
    """
    host, colon, port = listen.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"expected HOST:PORT such as 127.0.0.1:8000, got {listen!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _server_problems(config: Config) -> list[str]:
    server = config.server
    problems = _socket_path_problems("server.socket", server.socket)
    problems += _socket_path_problems("server.control", server.control)
    if server.socket and server.socket == server.control:
        problems.append(f"server.control: the same as server.socket: {server.socket}")
    if server.listen:
        try:
            parse_listen(server.listen)
        except ValueError as error:
            problems.append(f"server.listen: {error}")
    if server.socket_group:
        try:
            grp.getgrnam(server.socket_group)
        except KeyError:
            problems.append(f"server.socket_group: no group '{server.socket_group}' on this host")
    if server.api_key_file and (why := absence(server.api_key_file, Path.is_file)) is not None:
        problems.append(f"server.api_key_file: no file {server.api_key_file}{why}")
    return problems


def _socket_path_problems(key: str, path: str) -> list[str]:
    size = len(path.encode())
    if "\0" in path:
        return [f"{key}: a path holds no zero bytes: {path!r}"]
    if size > MAX_SOCKET_PATH:
        return [f"{key}: path of {size} bytes; the system takes {MAX_SOCKET_PATH}: {path}"]
    if path and (why := absence(Path(path).parent, Path.is_dir)) is not None:
        return [f"{key}: no folder {Path(path).parent}{why}"]
    return []


def _name_problems(table: str, name: str) -> list[str]:
    if name in RESERVED_NAMES:
        return [f"{dotted((table, name))}: the name is reserved"]
    if not _NAME.fullmatch(name):
        return [
            f"{dotted((table, name))}: a name is letters, digits and . _ : / @ + -, and starts with a letter or digit"
        ]
    return []


def _model_problems(name: str, model: Model) -> list[str]:
    key = f"models.{name}"
    problems = []
    path = Path(model.path)
    if model.path.startswith("builtin:"):
        problems.append(f"{key}.path: no such built-in model: {model.path}; known: builtin:small, builtin:large")
    elif model.format == "script":
        if (why := absence(path, Path.is_file)) is not None:
            problems.append(f"{key}.path: no script file {path}{why}")
    elif (why := absence(path, Path.is_dir)) is not None:
        problems.append(f"{key}.path: no model directory {path}{why}")
    elif (why := absence(path / "config.json", Path.is_file)) is not None:
        problems.append(f"{key}.path: no config.json in {path}{why}; expected a Hugging Face model directory")
    if model.tokenizer and (why := absence(model.tokenizer, Path.is_dir)) is not None:
        problems.append(f"{key}.tokenizer: no directory {model.tokenizer}{why}")
    if not is_device(model.device):
        problems.append(f"{key}.device: expected 'cpu' or a CUDA device such as 'cuda:0', got {model.device!r}")
    return problems


def _gpu_problems(config: Config) -> list[str]:
    """What must hold between models and the GPUs that they name; whether these GPUs are there is not known here."""
    problems = []
    for name, model in config.models.items():
        key, count = f"models.{name}", model.tensor_parallel
        if count & (count - 1):
            problems.append(f"{key}.tensor_parallel: expected a power of two, got {count}")
        if model.gpus:
            problems += _sm_problems(name, config)
            if count > 1 and model.backend == "torch":
                problems.append(f"{key}.tensor_parallel: the 'torch' backend cannot split a model; use 'flashinfer'")
            continue
        where = f"the device is {model.device!r}" if model.format == "hf" else "a script runs on the CPU"
        if count > 1:
            problems.append(f"{key}.tensor_parallel: splits a model over GPUs, but {where}")
        if model.backend == "flashinfer":
            problems.append(f"{key}.backend: 'flashinfer' needs a CUDA device, but {where}")
        if model.load_format == "dummy":
            problems.append(f"{key}.load_format: random weights are made on a GPU, but {where}")
        if model.sm_percent:
            problems.append(f"{key}.sm_percent: limits a model on a GPU, but {where}")
        if model.megakernel == "on":
            problems.append(f"{key}.megakernel: runs on a GPU, but {where}")
    return problems + _split_problems(config) + _megakernel_problems(config)


def _megakernel_problems(config: Config) -> list[str]:
    """Persistent kernels on one GPU whose blocks are not all there at once could wait for each other for ever."""
    if not config.batching.overlap:
        return []
    problems = []
    for gpu in config.shared_gpus:
        asked = [name for name in config.sharing(gpu) if config.models[name].megakernel == "on"]
        parts = [config.models[name].megakernel_percent for name in asked]
        if len(asked) > 1 and (min(parts) == 0 or sum(parts) > 100):
            problems.append(
                f"models.{asked[1]}.megakernel: on GPU {gpu} '{asked[0]}' says 'on' as well; set one of them to 'off', divide the"
                " GPU (megakernel_percent of all that say 'on', 100 in all at most), or let them take turns (batching.overlap ="
                " false)"
            )
    return list(dict.fromkeys(problems))


def _sm_problems(name: str, config: Config) -> list[str]:
    if not config.models[name].sm_percent:
        return []
    key = f"models.{name}.sm_percent"
    if config.gpu.mps == "off":
        return [f"{key}: works through MPS, but gpu.mps is 'off'"]
    if not set(config.models[name].gpus) & set(config.shared_gpus):
        return [f"{key}: works through MPS, which only models that share a GPU get; no other model is on this one's"]
    return []


def _split_problems(config: Config) -> list[str]:
    """Two split models on one GPU can wait for each other for ever: the kernels of each wait for those on its other GPUs."""
    problems = []
    split = [(name, model.gpus) for name, model in config.models.items() if len(model.gpus) > 1]
    for index, (name, gpus) in enumerate(split):
        for other, others in split[:index]:
            if set(gpus) & set(others):
                problems.append(
                    f"models.{name}.tensor_parallel: its GPUs {_span(gpus)} overlap with those of '{other}', {_span(others)},"
                    " which is split too; give split models GPUs of their own"
                )
    return problems


def _span(gpus: range) -> str:
    return f"{gpus[0]} to {gpus[-1]}"


def _route_problems(name: str, route: Route, config: Config) -> list[str]:
    key = f"routes.{name}"
    problems = []
    if name in config.models:
        problems.append(f"{key}: the name is also a model's; every model is a route of its own")
    for model in route.models:
        if model not in config.models:
            problems.append(f"{key}.models: unknown model '{model}'{suggestion(model, config.models)}")
    if len(set(route.models)) < len(route.models):
        problems.append(f"{key}.models: a model is named twice: {', '.join(route.models)}")
    if "/" in route.algorithm and (why := absence(route.algorithm, Path.is_file)) is not None:
        problems.append(f"{key}.algorithm: no file {route.algorithm}{why}")
    return problems
