"""Labels and head of R2R (arXiv 2505.21600).

The large model answers; the small one reads along. Where its token differs, the large model goes on from that token too, and a
judge compares: the place is divergent if the two continuations do not come to the same. Everywhere else it is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from algorithms.r2r_router import save
from models.batch import StepOutput
from trouterd.training.fit import Fit, fit
from trouterd.training.head import Count, Epoch, JudgedTrainer, Labels, balance, schedule
from trouterd.training.judge import ends_sentence
from trouterd.training.options import TrainOptions
from trouterd.training.pair import Pair
from trouterd.training.prompts import Prompt
from trouterd.training.scaling import Standard, fold
from trouterd.training.shards import Shards, Tensors
from trouterd.training.signal import Signal
from trouterd.training.writing import write

TOP = 100
"""Largest raw logits that the router sees."""
DROPOUT = 0.1
EXPANSION = 4
_SMALLEST_OFFICIAL = 512
"""Hidden size from which on the router has the published sizes."""


def sizes(hidden: int) -> tuple[int, int]:
    """Width and number of the router's blocks: 6 of 1024 as published, for toy models 2 of their own hidden size."""
    return (1024, 6) if hidden >= _SMALLEST_OFFICIAL else (hidden, 2)


class R2RTrainer(JudgedTrainer):
    """Trainer of `r2r`."""

    def collect(self, pair: Pair, prompts: Sequence[Prompt], shards: Shards, done: Count) -> Tensors:
        """Per place of the large model's answers: hidden, top, token (the small one's), label (1 = divergent)."""
        return shards.collect("labels", prompts, lambda piece, first: self._label(pair, piece, first), done)

    def wanted(self, tensors: Tensors) -> torch.Tensor:
        """The divergent places."""
        return tensors["label"] == 1

    def fit(self, pair: Pair, labels: Labels, epoch: Epoch) -> tuple[R2RHead, Fit]:
        """BCE with logits, the rare divergent places weighing as much as all others."""
        embedding = pair.small.runner.embedding
        if embedding is None:
            raise RuntimeError("a model with weights has an embedding")
        torch.manual_seed(self._options.pair.seed)
        head = R2RHead(embedding, labels.tensors, labels.train, self._options)
        target = self.wanted(labels.tensors).float().to(embedding.device)
        weight = balance(target[labels.train])
        inputs = [labels.tensors[name].to(embedding.device) for name in ("hidden", "token", "top")]

        def loss(rows: torch.Tensor) -> torch.Tensor:
            logits = head.network(*(part[rows] for part in inputs))
            return functional.binary_cross_entropy_with_logits(logits, target[rows], pos_weight=weight)

        plan = schedule(self._options, epochs=50, batch=256, rate=5e-4, weight_decay=5e-4)
        return head, fit(head.network, loss, labels.train, labels.validation, plan, epoch)

    def _label(self, pair: Pair, prompts: Sequence[Prompt], first: int) -> Tensors:
        answers = write(pair.large, [prompt.ids for prompt in prompts], pair.limit, pair.eos_ids)
        texts = [([*prompt.ids, *answer], len(prompt.ids)) for prompt, answer in zip(prompts, answers, strict=True)]
        rows = pair.small.read(texts, _digest)
        differing = [
            (number, place, int(rows[number][2][place]))
            for number, answer in enumerate(answers)
            for place, token in enumerate(answer)
            if int(rows[number][2][place]) != token
        ]
        label = [torch.zeros(len(answer), dtype=torch.int8) for answer in answers]
        for (number, place, _), divergent in zip(
            differing, self._judged(pair, prompts, answers, differing), strict=True
        ):
            label[number][place] = divergent
        return {
            "text": torch.cat([torch.full((len(a),), first + number) for number, a in enumerate(answers)]),
            "hidden": torch.cat([part[0] for part in rows]),
            "top": torch.cat([part[1] for part in rows]),
            "token": torch.cat([part[2] for part in rows]),
            "label": torch.cat(label),
        }

    def _judged(
        self,
        pair: Pair,
        prompts: Sequence[Prompt],
        answers: Sequence[list[int]],
        differing: Sequence[tuple[int, int, int]],
    ) -> list[bool]:
        """Whether each differing place (answer, place, the small model's token) is divergent."""
        going = [row for row in differing if row[2] not in pair.eos_ids]
        by_sentence = self._options.judge == "text"
        written = write(
            pair.large,
            [[*prompts[number].ids, *answers[number][:place], token] for number, place, token in going],
            pair.limit,
            pair.eos_ids,
            (lambda ids: ends_sentence(pair.text(ids))) if by_sentence else None,
        )
        others = dict(zip(going, written, strict=True))
        divergent = []
        for row in differing:
            number, place, token = row
            kept = answers[number][:place]
            mine, other = answers[number][place:], [token, *others.get(row, [])]
            if by_sentence:
                divergent.append(not self._judge(_sentence(pair, mine), pair.text(other)))
            else:
                divergent.append(not self._judge(pair.text(answers[number]), pair.text([*kept, *other])))
        return divergent


class R2RHead:
    """The router in training.

    Args:
        embedding: [V, E] of the small model; looked up, never trained.
        tensors: labelled rows.
        train: [N] the rows whose scales count.
        options: width and number of the blocks.
    """

    def __init__(self, embedding: torch.Tensor, tensors: Tensors, train: torch.Tensor, options: TrainOptions) -> None:
        hidden, top = tensors["hidden"].shape[1], tensors["top"].shape[1]
        width, blocks = sizes(hidden)
        width, blocks = options.width or width, options.blocks or blocks
        scales = [
            Standard(rows.float())
            for rows in (
                tensors["hidden"][train],
                embedding[tensors["token"][train].to(embedding.device)].cpu(),
                tensors["top"][train],
            )
        ]
        self.network = R2RNetwork(embedding, top, [width] * blocks, scales).to(embedding.device)
        self._sizes = hidden, top, [width] * blocks
        self.signal = Signal(small=self._values)

    @torch.no_grad()
    def values(self, tensors: Tensors) -> torch.Tensor:
        """Probabilities of divergence."""
        device = self.network.embedding.device
        pieces = [
            self.network(*(tensors[name][start : start + 4096].to(device) for name in ("hidden", "token", "top")))
            for start in range(0, len(tensors["token"]), 4096)
        ]
        return torch.cat(pieces).sigmoid().cpu()

    def save(self, path: Path, threshold: float, model: str) -> None:
        """The official dict, without the embedding."""
        hidden, top, widths = self._sizes
        init_args = {
            "hidden_states_size": hidden,
            "logits_size": top,
            "hidden_dims": widths,
            "expansion_factor": EXPANSION,
            "dropout_rate": DROPOUT,
            "use_position_embedding": False,
            "freeze_lm_head": True,
            "normalize_input": False,
            "pretrained_model_name": model,
        }
        save(path, self.network.official_state(), init_args, threshold)

    @torch.no_grad()
    def _values(self, output: StepOutput, tokens: torch.Tensor) -> torch.Tensor:
        hidden, top = output.hidden.float(), output.logits.topk(self._sizes[1]).values
        return torch.sigmoid(self.network(hidden, tokens, top))


class _Block(nn.Module):
    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.layer_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, EXPANSION * width),
            nn.GELU(),
            nn.Dropout(DROPOUT),
            nn.Linear(EXPANSION * width, out),
            nn.Dropout(DROPOUT),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        changed: torch.Tensor = x + self.mlp(self.layer_norm(x))
        return changed


class _Backbone(nn.Module):
    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.input_projection = nn.Linear(widths[0], widths[0])
        self.blocks = nn.Sequential(*(_Block(width, width) for width in widths))
        self.output_layer = nn.Sequential(nn.LayerNorm(widths[-1]), nn.Linear(widths[-1], 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logit: torch.Tensor = self.output_layer(self.blocks(self.input_projection(x)))
        return logit


class R2RNetwork(nn.Module):
    """The official network (class HiddenStatesTokenLMHeadLogitsClassifier) on standardised inputs; names are the official ones.

    Args:
        embedding: [V, E]
        top: logits per row.
        widths: of the blocks, all equal.
        scales: of hidden states, embeddings and logits.
    """

    def __init__(self, embedding: torch.Tensor, top: int, widths: Sequence[int], scales: Sequence[Standard]) -> None:
        super().__init__()
        hidden = len(scales[0].mean)
        self.embedding = embedding
        self.hidden_scale, self.embedding_scale, self.top_scale = scales
        self.logits_projection = nn.Linear(top, hidden)
        self.combined_projection = nn.Linear(2 * hidden + embedding.shape[1], widths[0])
        self.backbone = _Backbone(widths)

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
        """[R] logits of divergence from hidden states [R, H], the sampled tokens [R] and the largest logits [R, top]."""
        logits = self.logits_projection(self.top_scale(top.float()))
        embedded = self.embedding_scale(self.embedding[tokens].float())
        x = self.combined_projection(torch.cat((self.hidden_scale(hidden.float()), embedded, logits), dim=-1))
        logit: torch.Tensor = self.backbone(x)
        return logit.squeeze(-1)

    def official_state(self) -> Tensors:
        """The state dict of the network on plain inputs."""
        state = {name: value.detach() for name, value in self.state_dict().items() if "_scale." not in name}
        hidden, embedded, top = self.hidden_scale, self.embedding_scale, self.top_scale
        name = "logits_projection"
        state[f"{name}.weight"], state[f"{name}.bias"] = top.folded(state[f"{name}.weight"], state[f"{name}.bias"])
        both = torch.cat((hidden.mean, embedded.mean)), torch.cat((hidden.deviation, embedded.deviation))
        weight, bias = state["combined_projection.weight"], state["combined_projection.bias"]
        first, bias = fold(weight[:, : len(both[0])], bias, *both)
        state["combined_projection.weight"] = torch.cat((first, weight[:, len(both[0]) :]), dim=1)
        state["combined_projection.bias"] = bias
        return {name: value.cpu() for name, value in state.items()}


def _digest(output: StepOutput, following: torch.Tensor) -> tuple[torch.Tensor, ...]:
    del following
    top = output.logits.topk(min(TOP, output.logits.shape[1])).values
    return output.hidden.float(), top, output.logits.argmax(-1)


def _sentence(pair: Pair, ids: Sequence[int]) -> str:
    """The text of ids up to the end of its first sentence, which the first id alone does not end."""
    for end in range(2, len(ids)):
        if ends_sentence(pair.text(ids[1:end])):
            return pair.text(ids[:end])
    return pair.text(ids)
