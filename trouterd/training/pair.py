"""The two models of a route, loaded to read and write texts in this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from models.config import ModelError
from models.defer import defer_row
from models.shape import load_shape
from models.tokenizer import Tokenizer
from trouterd.config import Config, Model
from trouterd.training.faults import TrainingError
from trouterd.training.reader import Reader
from trouterd.worker.engine import open_torch_runner


@dataclass(frozen=True, slots=True)
class Pair:
    """A small and a large model of one vocabulary."""

    small: Reader
    large: Reader
    tokenizer: Tokenizer
    limit: int
    """Most tokens of one answer."""

    @property
    def eos_ids(self) -> frozenset[int]:
        """Any of them ends an answer, whoever wrote it."""
        return self.small.eos_ids | self.large.eos_ids

    def text(self, ids: Sequence[int]) -> str:
        """The text of an answer."""
        return self.tokenizer.decode(ids)


@dataclass(frozen=True, slots=True)
class PairFiles:
    """Names, settings and tokenizer of the two models; no weights yet."""

    small_name: str
    large_name: str
    small: Model
    large: Model
    tokenizer: Tokenizer
    eos_ids: tuple[frozenset[int], frozenset[int]]

    @classmethod
    def of(cls, config: Config, route: str) -> PairFiles:
        """The models of a route.

        Raises:
            TrainingError: no such route, not two models with weights, or vocabularies that differ.
            ModelError: a tokenizer that cannot be read.
        """
        if route not in config.routes:
            known = ", ".join(config.routes) or "none is configured"
            raise TrainingError(f"--route: no route '{route}'; known: {known}")
        names = config.routes[route].models
        if len(names) != 2:
            raise TrainingError(f"--route: '{route}' has {len(names)} models; a pair is needed")
        small, large = (config.models[name] for name in names)
        for name, model in zip(names, (small, large), strict=True):
            if model.format == "script" or model.load_format == "dummy":
                raise TrainingError(f"models.{name}: has no weights to learn from")
            if model.tensor_parallel > 1:
                raise TrainingError(
                    f"models.{name}.tensor_parallel: training reads a model on one device; set it to 1 (--set)"
                )
        one, other = (Tokenizer.load(Path(model.tokenizer_folder)) for model in (small, large))
        difference = one.first_difference(other)
        if difference is not None:
            raise TrainingError(f"the tokenizers of '{names[0]}' and '{names[1]}' differ: {difference}")
        return cls(names[0], names[1], small, large, one, (one.eos_ids, other.eos_ids))

    def open(self, *, texts: int, longest_prompt: int, limit: int) -> Pair:
        """Load both.

        Args:
            texts: texts that are read at once.
            longest_prompt: tokens.
            limit: most tokens of an answer.

        Raises:
            TrainingError: a prompt that does not fit into a model, or a lack of memory.
            ModelError: weights that cannot be read.
        """
        readers = [
            self._reader(name, model, eos_ids, texts, longest_prompt + limit)
            for name, model, eos_ids in zip(
                (self.small_name, self.large_name), (self.small, self.large), self.eos_ids, strict=True
            )
        ]
        return Pair(readers[0], readers[1], self.tokenizer, limit)

    def _reader(self, name: str, model: Model, eos_ids: frozenset[int], texts: int, context: int) -> Reader:
        shape = load_shape(Path(model.path))
        most = model.context_length or shape.context_length
        if context > most:
            raise TrainingError(
                f"the longest prompt and --max-tokens need {context} tokens, but models.{name} takes {most};"
                " lower --max-tokens or leave the longest prompts out"
            )
        pages = texts * -(-context // model.page_size)
        torch.set_num_threads(model.threads)
        try:
            runner = open_torch_runner(model, shape, pages, context)
            defer = defer_row(Path(model.path))
        except RuntimeError as error:  # torch has no narrower one for a lack of memory on a CPU
            size = pages * model.page_size * shape.kv_bytes_per_token(model.element_bytes) / 2**20
            raise TrainingError(
                f"models.{name}: not enough memory for the weights and {size:.0f} MiB of KV;"
                f" lower --texts or --max-tokens ({str(error).splitlines()[0]})"
            ) from error
        except ModelError as error:
            raise ModelError(f"models.{name}: {error}") from error
        return Reader(runner, texts, context, eos_ids, defer)
