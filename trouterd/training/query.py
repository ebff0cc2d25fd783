"""Labels and head of query-level routing: whether the small model will answer a whole prompt right.

The head is CITER's, on the hidden state of the prompt's last token. A small model's answer is right if it comes to the prompt's
`answer`, or, where that is not known, to what the large model answers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from models.batch import StepOutput
from trouterd.training.confidence import ConfidenceHead, fit_confidence
from trouterd.training.fit import Fit
from trouterd.training.head import Count, Epoch, JudgedTrainer, Labels, schedule
from trouterd.training.judge import is_right
from trouterd.training.pair import Pair
from trouterd.training.prompts import Prompt
from trouterd.training.shards import Shards, Tensors
from trouterd.training.writing import write


class QueryTrainer(JudgedTrainer):
    """Trainer of `query`."""

    def collect(self, pair: Pair, prompts: Sequence[Prompt], shards: Shards, done: Count) -> Tensors:
        """Per prompt: hidden, and label (1: the small model's answer is right)."""
        return shards.collect("labels", prompts, lambda piece, first: self._label(pair, piece, first), done)

    def wanted(self, tensors: Tensors) -> torch.Tensor:
        """The prompts that the small model answers wrong."""
        return tensors["label"] == 0

    def fit(self, pair: Pair, labels: Labels, epoch: Epoch) -> tuple[ConfidenceHead, Fit]:
        """BCE with logits."""
        plan = schedule(self._options, epochs=100, batch=64, rate=3e-4, weight_decay=0.05)
        every = torch.ones(len(labels.tensors["label"]), dtype=torch.bool)
        return fit_confidence(labels, every, plan, pair.small.device, epoch, once=True)

    def _label(self, pair: Pair, prompts: Sequence[Prompt], first: int) -> Tensors:
        answers = write(pair.small, [prompt.ids for prompt in prompts], pair.limit, pair.eos_ids)
        unknown = [prompt.ids for prompt in prompts if prompt.answer is None]
        references = iter(write(pair.large, unknown, pair.limit, pair.eos_ids))
        right = [
            is_right(pair.text(answer), prompt.answer)
            if prompt.answer is not None
            else self._judge(pair.text(answer), pair.text(next(references)))
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        # One more id after each prompt, so that its last one is read; which one it is does not matter.
        texts = [([*prompt.ids, prompt.ids[0]], len(prompt.ids)) for prompt in prompts]
        return {
            "text": torch.arange(first, first + len(prompts)),
            "hidden": torch.cat([rows[0] for rows in pair.small.read(texts, _digest)]),
            "label": torch.tensor(right, dtype=torch.int8),
        }


def _digest(output: StepOutput, following: torch.Tensor) -> tuple[torch.Tensor, ...]:
    del following
    return (output.hidden.float(),)
