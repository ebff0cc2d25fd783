"""Which model of an experiment has the persistent kernel of a GPU that models share."""

from __future__ import annotations

import tempfile
from pathlib import Path

import msgspec

from bench.experiment_case import CaseError
from bench.experiment_settings import FLAG
from bench.experiment_setup import Setup
from models.config import ModelError
from trouterd.batching.placement import SHARED
from trouterd.config import Config, Route
from trouterd.settings import ConfigError
from trouterd.worker.gpu_check import Gpu, Host, device_problem, may_use_megakernel

H200 = Gpu("NVIDIA H200", (9, 0), 141 * 10**9)
"""With its published memory: what is taken for every GPU of an experiment where this host lacks one of them, since --list tells
of experiments that run elsewhere."""


def kernel_model(setup: Setup, host: Host | None = None) -> str:
    """The first model that has the persistent kernel of its GPU and shares that; '' for none.

    The rule is the daemon's, in which every route visits all models but the first.

    Args:
        setup: the models.
        host: that they are served on; None: this one.

    Raises:
        CaseError: no daemon would serve these models so; the message names the key.
    """
    if setup.placement != SHARED:
        return ""
    with tempfile.TemporaryDirectory() as folder:
        try:
            alone = setup.config(Path(folder))
            config = msgspec.structs.replace(alone, routes={"all": Route(models=list(setup.names))})
            where = _with_all_gpus(config, host or Host.this())
            able = [name for name in setup.names if may_use_megakernel(name, config, where)]
        except ConfigError as error:
            raise CaseError("; ".join(error.problems)) from error
        except ModelError as error:
            raise CaseError(f"{FLAG} {error}") from error
    return next((name for name in able if len(config.sharing(config.models[name].gpus[0])) > 1), "")


def _with_all_gpus(config: Config, host: Host) -> Host:
    """A host that has the GPUs of all models."""
    if not any(device_problem(model, host) for model in config.models.values()):
        return host
    return Host((H200,) * (1 + max(gpu for model in config.models.values() for gpu in model.gpus)), triton=True)
