"""How the routing algorithms of the literature move requests: rates at which decisions are drawn, and whose head runs beside them.

The rates are those that TokenRouter's measurements of Qwen3-0.6B and 32B imply (arXiv 2610.12242), and 0.10 for a router that hands
over rarely. With random weights they stand in for decisions that only trained models can make.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.step_heads import HeadInputs, write_head
from trouterd.batching.network import Matrix, Network, StepTime, keep_commit

_DRAWN = Path(__file__).with_name("drawn.py")
_TRAINED = ("r2r", "citer", "collm")
"""Heads that are read from a file."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """An algorithm of two models of the rewrite family."""

    name: str
    """In tables."""
    key: str
    """On command lines."""
    head: str
    """The algorithm that runs at every step; its route has the same name, so that patterns of one head share it."""
    p: float
    """Share of the small model's steps that hand over."""
    q: float = 1.0
    """Share of the large model's steps that hand back."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of the head, beside its checkpoint."""

    @property
    def route(self) -> str:
        """As requests name it."""
        return self.head

    @property
    def body(self) -> dict[str, Any]:
        """What requests say of it."""
        return {"route": {"params": {"p": self.p, "q": self.q}}}

    @property
    def writes_on(self) -> bool:
        """Whether the peer may write several tokens in a row."""
        return self.q < 1

    @property
    def algorithm_path(self) -> str:
        """Of the algorithm that draws."""
        return str(_DRAWN)

    def route_params(self, folder: Path, inputs: HeadInputs | None, device: str) -> dict[str, Any]:
        """Parameters of its route; writes a head with random weights where it has one.

        Args:
            folder: for the head's file.
            inputs: what the small model gives a head; None for one without weights (a script), beside which none runs.
            device: of the small model.
        """
        params: dict[str, Any] = {"p": self.p, "q": self.q}
        if inputs is None:
            return params
        settings = dict(self.settings)
        if self.head in _TRAINED:
            path = folder.resolve() / f"{self.route}.head"
            write_head(self.head, path, inputs)
            settings |= {"checkpoint": str(path), "threshold": 0.5}
        if self.head == "r2r" and device.startswith("cuda"):
            settings["dtype"] = "bfloat16"
        return params | {"head": self.head, "settings": settings}

    def network(self, step_times: Sequence[StepTime], contention: Sequence[float], handoff: float) -> Network:
        """The throughput model's view; a hand-off takes `handoff` seconds."""
        return Network.pair(step_times, self.p, self.q, contention=contention, handoff=handoff)


@dataclass(frozen=True, slots=True)
class Mixture:
    """ME: every token's writer is drawn by weight, by the algorithm itself."""

    name: str
    key: str
    weights: tuple[float, ...]
    """One per model, entry first."""

    @property
    def route(self) -> str:
        """As requests name it."""
        return self.key

    @property
    def body(self) -> dict[str, Any]:
        """What requests say of it."""
        return {}

    @property
    def writes_on(self) -> bool:
        """Whether a peer may write several tokens in a row."""
        return True

    @property
    def algorithm_path(self) -> str:
        """Of the algorithm."""
        return "me"

    def route_params(self, folder: Path, inputs: HeadInputs | None, device: str) -> dict[str, Any]:
        """Parameters of its route."""
        del folder, inputs, device
        return {"weights": list(self.weights)}

    def network(self, step_times: Sequence[StepTime], contention: Sequence[float], handoff: float) -> Network:
        """The throughput model's view: whoever wrote a token, the next one's writer is drawn by the weights."""
        total = sum(self.weights)
        row = tuple(weight / total for weight in self.weights)
        routing: Matrix = (row,) * len(row)
        return Network(tuple(step_times), routing, keep_commit(len(row)), tuple(contention), handoff=handoff)


R2R = Pattern("R2R, p = 0.35", "r2r-35", "r2r", 0.35)
R2R_27 = Pattern("R2R, p = 0.27", "r2r-27", "r2r", 0.27)
R2R_10 = Pattern("R2R, p = 0.10", "r2r-10", "r2r", 0.10)
CITER = Pattern("CITER, p = 0.135", "citer", "citer", 0.135)
COLLM = Pattern("Co-LLM, p = 0.54", "collm", "collm", 0.54)
RSTITCH = Pattern("R-Stitch, p = 0.347, q = 0.177", "rstitch", "rstitch", 0.347, 0.177, settings={"tau": 0.03})
PATTERNS = (R2R, R2R_10, CITER, COLLM, RSTITCH, R2R_27)
"""By importance."""
ME = Mixture("ME, 0.5 : 0.3 : 0.2", "me", (0.5, 0.3, 0.2))
