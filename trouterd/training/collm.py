"""Labels and deferral row of Co-LLM (arXiv 2403.03870), the small model itself left as it is (`fine_tune` is the other way).

Both models read an answer (the prompt's `completion`, or what the large model answers). With P = sigmoid(w h + b) the loss of a
token x is -log[(1 - P) p_small(x) + P p_large(x)]: nobody says which tokens to defer. The row starts from a search: it learns to
find the places where the large model's likeliest token is the answer's and the small one's is not. That search also has a
share in the loss afterwards, as in the official code's weakly supervised variant: with the small model frozen the mixture alone has
no reason not to defer wherever the large model is only a little better.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from models.batch import StepOutput
from trouterd.training.fit import Fit, Schedule, fit
from trouterd.training.gold import gold_answers
from trouterd.training.head import Count, Epoch, Labels, balance, schedule
from trouterd.training.options import TrainOptions
from trouterd.training.pair import Pair
from trouterd.training.prompts import Prompt
from trouterd.training.reader import Reader, Rows
from trouterd.training.scaling import Standard
from trouterd.training.shards import Shards, Tensors
from trouterd.training.signal import Signal

SEARCH_SHARE = 1 / 3
"""Of the search's loss in the main one, as in the official code."""
SEARCH_EPOCHS = 5


class CollmTrainer:
    """Trainer of `collm`."""

    def __init__(self, options: TrainOptions) -> None:
        self._options = options

    def arguments(self) -> dict[str, object]:
        """Which tensors they are."""
        return {"labels": 2}

    def collect(self, pair: Pair, prompts: Sequence[Prompt], shards: Shards, done: Count) -> Tensors:
        """Per place of the answers: hidden, gold, its log-probabilities (small, large), large_right, and defer (for the search)."""
        return shards.collect("labels", prompts, lambda piece, first: _label(pair, piece, first), done)

    def wanted(self, tensors: Tensors) -> torch.Tensor:
        """The places where the large model is right and the small one is not."""
        return tensors["defer"] == 1

    def fit(self, pair: Pair, labels: Labels, epoch: Epoch) -> tuple[CollmHead, Fit]:
        """The search, then the mixture's loss with it."""
        device = pair.small.device
        hidden, small, large = (labels.tensors[name].to(device) for name in ("hidden", "small", "large"))
        defer = self.wanted(labels.tensors).float().to(device)
        network = DeferralRow(Standard(hidden[labels.train])).to(device)
        weight = balance(defer[labels.train])

        def search(rows: torch.Tensor) -> torch.Tensor:
            return functional.binary_cross_entropy_with_logits(network(hidden[rows]), defer[rows], pos_weight=weight)

        def both(rows: torch.Tensor) -> torch.Tensor:
            logit = network(hidden[rows])
            parts = functional.logsigmoid(-logit) + small[rows], functional.logsigmoid(logit) + large[rows]
            mixture = -torch.logaddexp(*parts).mean()
            return (1 - SEARCH_SHARE) * mixture + SEARCH_SHARE * search(rows)

        plan = schedule(self._options, epochs=100, batch=256, rate=3e-3, weight_decay=0.0)
        first = Schedule(SEARCH_EPOCHS, plan.batch, plan.rate, 0.0, SEARCH_EPOCHS, plan.seed)
        fit(network, search, labels.train, labels.validation, first, lambda *_: None)
        return CollmHead(network), fit(network, both, labels.train, labels.validation, plan, epoch)


class DeferralRow(nn.Module):
    """One more row of the LM head, on standardised inputs, from zero.

    Args:
        scale: of hidden states.
    """

    def __init__(self, scale: Standard) -> None:
        super().__init__()
        self.scale = scale
        self.row = nn.Linear(len(scale.mean), 1)
        nn.init.zeros_(self.row.weight)
        nn.init.zeros_(self.row.bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R] logits of deferring from hidden states [R, H]."""
        logit: torch.Tensor = self.row(self.scale(hidden.float()))
        return logit.squeeze(-1)


class CollmHead:
    """A trained row."""

    def __init__(self, network: DeferralRow) -> None:
        self.network = network
        self.signal = Signal(small=self._values)

    @torch.no_grad()
    def values(self, tensors: Tensors) -> torch.Tensor:
        """Probabilities of deferring."""
        logits: torch.Tensor = self.network(tensors["hidden"].to(self.network.row.weight.device))
        return logits.sigmoid().cpu()

    def save(self, path: Path, threshold: float, model: str) -> None:
        """safetensors with defer.weight [1, H] and defer.bias [1]."""
        del threshold, model
        weight, bias = self.network.scale.folded(self.network.row.weight.detach(), self.network.row.bias.detach())
        save_file({"defer.weight": weight.cpu(), "defer.bias": bias.cpu()}, path)

    @torch.no_grad()
    def _values(self, output: StepOutput, tokens: torch.Tensor) -> torch.Tensor:
        del tokens
        return torch.sigmoid(self.network(output.hidden))


def _label(pair: Pair, prompts: Sequence[Prompt], first: int) -> Tensors:
    answers = gold_answers(pair, prompts)
    texts = [([*prompt.ids, *answer], len(prompt.ids)) for prompt, answer in zip(prompts, answers, strict=True)]
    small, large = pair.small.read(texts, _digest), pair.large.read(texts, _digest)
    right = torch.cat([rows[2] for rows in large])
    return _small_side(small, right) | {
        "text": torch.cat([torch.full((len(answer),), first + n) for n, answer in enumerate(answers)]),
        "gold": torch.cat([torch.tensor(answer) for answer in answers]),
        "large": torch.cat([rows[1] for rows in large]),
        "large_right": right,
    }


def read_anew(small: Reader, texts: Sequence[tuple[Sequence[int], int]], tensors: Tensors) -> Tensors:
    """Labels with another small model's side.

    Args:
        small: the model.
        texts: (prompt and answer, length of the prompt) of all labels.
        tensors: the labels.
    """
    return tensors | _small_side(small.read(texts, _digest), tensors["large_right"])


def _small_side(read: Sequence[Rows], large_right: torch.Tensor) -> Tensors:
    hidden, taken, right = (torch.cat(column) for column in zip(*read, strict=True))
    return {"hidden": hidden, "small": taken, "defer": (large_right & ~right).to(torch.int8)}


def _digest(output: StepOutput, following: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Hidden states, log-probabilities of the tokens that follow, and whether they are the likeliest."""
    following = following.to(output.logits.device)
    taken = output.logits.gather(-1, following[:, None]).squeeze(-1) - output.logits.logsumexp(-1)
    return output.hidden.float(), taken, output.logits.argmax(-1) == following
