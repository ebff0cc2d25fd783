"""CITER's head (arXiv 2502.01976) in training: hidden state in, confidence that the small model will do out.

Linear (H to 2H), BatchNorm, ReLU, dropout, Linear (2H to H), dropout, Linear (H to 1), sigmoid; no activation between the last two.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from models.batch import StepOutput
from trouterd.training.fit import Fit, Schedule, fit
from trouterd.training.head import Epoch, Labels
from trouterd.training.scaling import Standard
from trouterd.training.shards import Tensors
from trouterd.training.signal import Signal

DROPOUT = 0.1


class ConfidenceNetwork(nn.Module):
    """The official network on standardised inputs; names are the official ones.

    Args:
        scale: of hidden states.
    """

    def __init__(self, scale: Standard) -> None:
        super().__init__()
        hidden = len(scale.mean)
        self.scale = scale
        self.mlp = nn.Sequential(
            nn.Linear(hidden, 2 * hidden),
            nn.BatchNorm1d(2 * hidden),
            nn.ReLU(),
            nn.Dropout(DROPOUT),
            nn.Linear(2 * hidden, hidden),
            nn.Dropout(DROPOUT),
        )
        self.linear = nn.Linear(hidden, 1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R] logits of confidence from hidden states [R, H]."""
        logit: torch.Tensor = self.linear(self.mlp(self.scale(hidden.float())))
        return logit.squeeze(-1)

    def official_state(self) -> Tensors:
        """The bare state dict of the network on plain inputs."""
        state = {name: value.detach() for name, value in self.state_dict().items() if not name.startswith("scale.")}
        state["mlp.0.weight"], state["mlp.0.bias"] = self.scale.folded(state["mlp.0.weight"], state["mlp.0.bias"])
        return {name: value.cpu() for name, value in state.items()}


class ConfidenceHead:
    """A trained head.

    Args:
        network: trained.
        once: it is asked about a whole answer, and its signal is 1 - s, which rises with the need for the large model (`query`);
            else s, below whose threshold the large model is asked (`citer`).
    """

    def __init__(self, network: ConfidenceNetwork, *, once: bool = False) -> None:
        self.network = network
        self.signal = Signal(small=self._values, rises=once, once=once)

    @torch.no_grad()
    def values(self, tensors: Tensors) -> torch.Tensor:
        """The signal of labelled rows."""
        return self._of(tensors["hidden"].to(self.network.linear.weight.device)).cpu()

    def save(self, path: Path, threshold: float, model: str) -> None:
        """The official bare state dict, which holds neither threshold nor model."""
        del threshold, model
        torch.save(self.network.official_state(), path)

    @torch.no_grad()
    def _values(self, output: StepOutput, tokens: torch.Tensor) -> torch.Tensor:
        del tokens
        return self._of(output.hidden)

    def _of(self, hidden: torch.Tensor) -> torch.Tensor:
        confidence = torch.sigmoid(self.network(hidden))
        return 1 - confidence if self.signal.once else confidence


def fit_confidence(
    labels: Labels, decided: torch.Tensor, plan: Schedule, device: torch.device, epoch: Epoch, *, once: bool = False
) -> tuple[ConfidenceHead, Fit]:
    """BCE with logits on the rows whose label is decided.

    Args:
        labels: rows with hidden states, and labels 1 (the small model will do) or 0.
        decided: [N] bool.
        plan: of the training.
        device: of the head.
        epoch: hears of every epoch.
        once: see `ConfidenceHead`.
    """
    torch.manual_seed(plan.seed)
    train, validation = (rows[decided[rows]] for rows in (labels.train, labels.validation))
    hidden, target = labels.tensors["hidden"].to(device), labels.tensors["label"].float().to(device)
    network = ConfidenceNetwork(Standard(hidden[train])).to(device)

    def loss(rows: torch.Tensor) -> torch.Tensor:
        return functional.binary_cross_entropy_with_logits(network(hidden[rows]), target[rows])

    result = fit(network, loss, train, validation, plan, epoch)
    return ConfidenceHead(network, once=once), result
