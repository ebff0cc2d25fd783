"""`trouterd check`: what can be known about a configuration without loading weights."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec
import torch

from algorithms.base import Definition, RouteContext
from algorithms.registry import AlgorithmError, is_builtin, load, validate_params
from models.config import ModelConfig, ModelError
from models.defer import defer_row
from models.script import ScriptError, ScriptRunner
from models.shape import Shape, load_shape
from models.tokenizer import Tokenizer, vocabulary_size
from models.transformers_config import TransformersConfig
from models.weights import Checkpoint, locate
from trouterd.api.scores import ScoreError, Scores
from trouterd.config import Config, Model, Route
from trouterd.consistency import absence
from trouterd.settings import PATH_PARAMS
from trouterd.worker.gpu_check import Host, choose_backend, device_problem, may_use_megakernel, memory_problems
from trouterd.worker.room import gpu_context, model_room, script_room


def deep_problems(config: Config) -> list[str]:
    """One line per problem, naming the key and the file: model directories, tokenizers of each route, algorithms, trained heads."""
    host = Host.this()
    problems = [problem for name in config.models for problem in _model_problems(name, config, host)]
    problems += [problem for _, problem in memory_problems(config, host)]
    tokenizers, unreadable = _tokenizers(config)
    problems += unreadable
    for name, route in config.routes.items():
        problems += _algorithm_problems(name, config)
        known = [(model, tokenizers[model]) for model in route.models if model in tokenizers]
        for other, tokenizer in known[1:]:
            entry, first = known[0]
            difference = first.first_difference(tokenizer)
            if difference is not None:
                problems.append(f"routes.{name}.models: the tokenizers of '{entry}' and '{other}' differ: {difference}")
    return problems


def remarks(config: Config) -> list[str]:
    """One line on each model that is served otherwise than its user may think."""
    host = Host.this()
    return [remark for name, model in config.models.items() for remark in _model_remarks(name, model, host)]


def _model_remarks(name: str, model: Model, host: Host) -> Iterable[str]:
    if model.format == "script":
        return
    try:
        shape = load_shape(Path(model.path))
        if model.gpus and not device_problem(model, host) and (why := choose_backend(name, model, shape, host).why):
            yield why
    except ModelError:
        return  # among the problems
    if isinstance(shape, TransformersConfig):
        yield f"models.{name}: {shape.family!r} is served by transformers' modelling code, which is slower than our own"
        if shape.bound:
            yield f"models.{name}: its context is {shape.context_length}: {shape.bound} of its config.json ends there"


def _model_problems(name: str, config: Config, host: Host) -> Iterable[str]:
    model = config.models[name]
    problem = device_problem(model, host)
    if problem:
        yield f"models.{name}.{problem}"
    try:
        if model.format == "script":
            script = ScriptRunner.load(Path(model.path))
        else:
            shape = load_shape(Path(model.path))
    except (ModelError, ScriptError) as error:
        yield f"models.{name}.path: {error}"
        return
    try:
        if model.format == "script":
            script_room(name, model, script)
        elif model.gpus:
            gpu_context(name, model, shape)
            if not problem:
                choose_backend(name, model, shape, host)
                may_use_megakernel(name, config, host)
        else:
            model_room(name, model, shape)
    except ModelError as error:
        yield str(error)
    if model.format != "script" and model.load_format != "dummy":
        yield from _file_problems(name, model, shape)


def _file_problems(name: str, model: Model, shape: Shape) -> Iterable[str]:
    """Only headers of the files are read, no tensor."""
    try:
        if isinstance(shape, ModelConfig):
            Checkpoint(Path(model.path), shape)
        else:
            locate(Path(model.path))
    except ModelError as error:
        yield f"models.{name}.path: {error}"


def _tokenizers(config: Config) -> tuple[dict[str, Tokenizer], list[str]]:
    """Tokenizers by model, those of one directory loaded once, and the problems of those that cannot be read."""
    loaded: dict[str, Tokenizer | ModelError] = {}
    tokenizers: dict[str, Tokenizer] = {}
    problems = []
    for name, model in config.models.items():
        folder = model.tokenizer_folder
        if folder not in loaded:
            loaded[folder] = _load_tokenizer(folder)
        tokenizer = loaded[folder]
        if isinstance(tokenizer, ModelError):
            problems.append(f"models.{name}.{'tokenizer' if model.tokenizer else 'path'}: {tokenizer}")
        else:
            tokenizers[name] = tokenizer
    return tokenizers, problems


def _load_tokenizer(folder: str) -> Tokenizer | ModelError:
    try:
        return Tokenizer.load(Path(folder))
    except ModelError as error:
        return error


def _algorithm_problems(name: str, config: Config) -> Iterable[str]:
    route = config.routes[name]
    absent = list(_absent_files(name, route))
    try:
        definition = load(route.algorithm)
        params = validate_params(definition, route.params, route.models)
        if not absent and is_builtin(route.algorithm) and hasattr(params, "checkpoint"):
            _try_head(name, config, definition, params)
    except AlgorithmError as error:
        key = "models" if error.key == "models" else f"params.{error.key}" if error.key else "algorithm"
        yield f"routes.{name}.{key}: {str(error).removeprefix(f'{error.key}: ')}"
    except ScoreError as error:
        yield str(error)
    yield from absent


def _try_head(name: str, config: Config, definition: Definition, params: msgspec.Struct) -> None:
    """Read a route's trained head as its entry, or the api, will. Raises AlgorithmError or ScoreError."""
    route = config.routes[name]
    Scores(msgspec.structs.replace(config, routes={name: route}))
    try:
        context = _entry_context(route.models, config.models[route.models[0]])
    except (ModelError, ScriptError):
        return  # among the model's problems
    definition.sides(0)(context, params)


def _entry_context(models: list[str], entry: Model) -> RouteContext:
    """What the entry's side will know of its model, with an embedding that has a width and no values."""
    cpu = torch.device("cpu")
    if entry.format == "script":
        script = ScriptRunner.load(Path(entry.path))
        return RouteContext(tuple(models), 0, script.vocab_size, script.hidden_size, cpu)
    shape, vocabulary = load_shape(Path(entry.path)), vocabulary_size(entry.tokenizer_folder)
    embedding = torch.empty(vocabulary, shape.hidden_size, device="meta")
    defer = None if entry.load_format == "dummy" else defer_row(Path(entry.path))
    return RouteContext(tuple(models), 0, vocabulary, shape.hidden_size, cpu, embedding, defer)


def _absent_files(name: str, route: Route) -> Iterable[str]:
    """Checkpoints are looked for here only: the configuration of a head that is still to be trained is valid."""
    for key in PATH_PARAMS & route.params.keys():
        path = route.params[key]
        if isinstance(path, str) and path and (why := absence(path, Path.exists)) is not None:
            yield f"routes.{name}.params.{key}: no file or directory {path}{why}"
