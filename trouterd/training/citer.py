"""Labels of CITER (arXiv 2502.01976): whether the small model's token will do, by shortcuts where they decide, else by trying it.

Both models read a right answer (the prompt's `completion`, or what the large model answers). At each place: 1 where the small
model's token is the answer's; else 0 where the large model's is; else both are wrong, and the answer is written on from the small
model's token: in round 1 by the small model alone, later by both with the head of the round before. The label is whether it comes
out right.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch

from models.batch import StepOutput
from trouterd.training.confidence import ConfidenceHead, fit_confidence
from trouterd.training.fit import Fit
from trouterd.training.gold import gold_answers
from trouterd.training.head import Count, Epoch, Head, JudgedTrainer, Labels, schedule
from trouterd.training.judge import is_right
from trouterd.training.pair import Pair
from trouterd.training.prompts import Prompt
from trouterd.training.shards import Shards, Tensors
from trouterd.training.writing import write, write_routed

UNDECIDED = -1
ROLLOUTS = 256
"""Continuations of one shard."""


class CiterTrainer(JudgedTrainer):
    """Trainer of `citer`."""

    def collect(self, pair: Pair, prompts: Sequence[Prompt], shards: Shards, done: Count) -> Tensors:
        """Per place of the right answers: hidden, token (the small model's), gold, label of round 1."""
        tensors = shards.collect("labels", prompts, lambda piece, first: self._label(pair, piece, first), done)

        def alone(texts: list[list[int]]) -> list[list[int]]:
            return write(pair.small, texts, pair.limit, pair.eos_ids)

        return self._tried(pair, prompts, shards, tensors, "round-1", alone)

    def refine(
        self,
        pair: Pair,
        prompts: Sequence[Prompt],
        shards: Shards,
        labels: Labels,
        head: Head,
        threshold: float,
        number: int,
    ) -> Tensors:
        """Labels of round `number`: places where both are wrong are tried once more, with the head."""
        digest = hashlib.blake2b(repr(threshold).encode(), digest_size=8)
        digest.update(head.values(labels.tensors).numpy().tobytes())  # labels of another head are other labels

        def routed(texts: list[list[int]]) -> list[list[int]]:
            return [answer.ids for answer in write_routed(pair, texts, head.signal.rule(threshold))]

        name = f"round-{number}-{digest.hexdigest()}"
        return self._tried(pair, prompts, shards, labels.tensors, name, routed)

    def wanted(self, tensors: Tensors) -> torch.Tensor:
        """The places where the small model's token will not do."""
        return tensors["label"] == 0

    def fit(self, pair: Pair, labels: Labels, epoch: Epoch) -> tuple[ConfidenceHead, Fit]:
        """BCE with logits."""
        plan = schedule(self._options, epochs=100, batch=256, rate=1e-3, weight_decay=0.01)
        device = pair.small.device
        return fit_confidence(labels, labels.tensors["label"] != UNDECIDED, plan, device, epoch)

    def _label(self, pair: Pair, prompts: Sequence[Prompt], first: int) -> Tensors:
        answers = gold_answers(pair, prompts)
        texts = [([*prompt.ids, *answer], len(prompt.ids)) for prompt, answer in zip(prompts, answers, strict=True)]
        small = pair.small.read(texts, _digest_small)
        large = pair.large.read(texts, _digest_large)
        token, gold = torch.cat([rows[1] for rows in small]), torch.cat([rows[2] for rows in small])
        other = torch.cat([rows[0] for rows in large])
        label = torch.where(other == gold, 0, UNDECIDED).masked_fill(token == gold, 1)
        return {
            "text": torch.cat([torch.full((len(answer),), first + n) for n, answer in enumerate(answers)]),
            "hidden": torch.cat([rows[0] for rows in small]),
            "token": token,
            "gold": gold,
            "shortcut": label.to(torch.int8),
        }

    def _tried(
        self,
        pair: Pair,
        prompts: Sequence[Prompt],
        shards: Shards,
        tensors: Tensors,
        name: str,
        go_on: Callable[[list[list[int]]], list[list[int]]],
    ) -> Tensors:
        """Tensors with `label`: shortcuts, and what trying shows where they do not decide."""
        rows = (tensors["shortcut"] == UNDECIDED).nonzero().flatten().tolist()
        starts = torch.cat((torch.zeros(1, dtype=torch.int64), tensors["text"].bincount().cumsum(0))).tolist()

        def label(piece: Sequence[int], _: int) -> Tensors:
            return {"label": torch.tensor(self._try(pair, prompts, tensors, starts, piece, go_on), dtype=torch.int8)}

        tried = shards.collect(name, rows, label, lambda _: None, size=ROLLOUTS)
        labels = tensors["shortcut"].clone()
        if rows:
            labels[rows] = tried["label"]
        return tensors | {"label": labels}

    def _try(
        self,
        pair: Pair,
        prompts: Sequence[Prompt],
        tensors: Tensors,
        starts: Sequence[int],
        rows: Sequence[int],
        go_on: Callable[[list[list[int]]], list[list[int]]],
    ) -> list[bool]:
        """Whether the answer comes out right after the small model's token at each of these rows."""
        texts = []
        for row in rows:
            number = int(tensors["text"][row])
            kept = tensors["gold"][starts[number] : row].tolist()
            texts.append((number, [*kept, int(tensors["token"][row])]))
        open_ends = [index for index, (_, ids) in enumerate(texts) if ids[-1] not in pair.eos_ids]
        written = go_on([[*prompts[texts[index][0]].ids, *texts[index][1]] for index in open_ends])
        for index, ids in zip(open_ends, written, strict=True):
            texts[index][1].extend(ids)
        right = []
        for number, ids in texts:
            answer, text = prompts[number].answer, pair.text(ids)
            if answer is not None:
                right.append(is_right(text, answer))
            else:
                gold = tensors["gold"][starts[number] : starts[number + 1]].tolist()
                right.append(self._judge(pair.text(gold), text))
        return right


def _digest_small(output: StepOutput, following: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return output.hidden.float(), output.logits.argmax(-1), following


def _digest_large(output: StepOutput, following: torch.Tensor) -> tuple[torch.Tensor, ...]:
    del following
    return (output.logits.argmax(-1),)
