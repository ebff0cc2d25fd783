"""Every algorithm through the whole daemon in its processes, against plain loops over transformers' own models."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import torch
from transformers import AutoModelForCausalLM

from ipc.messages import Sampling
from models.tokenizer import Tokenizer
from tests.algorithms import reference, reference_drafts, test_r2r
from tests.algorithms.heads import confidence_net, write_confidence, write_defer
from tests.algorithms.reference import First, Rule, Trace
from tests.daemon.instance import complete, serving
from tests.models.tiny import EOS, tiny_llama, tiny_qwen3

VOCAB = 258
"""Ids of the tokenizer; the models have two rows more."""
NAMES = ("small", "large", "huge")
PROMPT = [256, *b"The sum of two"]
REQUESTS: list[dict[str, Any]] = [
    {"temperature": 0.0, "seed": 0, "max_tokens": 16},
    {"temperature": 0.9, "top_p": 0.95, "seed": 77, "max_tokens": 24},
]


class Model:
    """A model of transformers that sees the whole text every time."""

    def __init__(self, directory: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
        self._model.eval()

    def __call__(self, ids: Sequence[int]) -> torch.Tensor:
        """[V] logits of the next token."""
        return self._output(ids).logits[0, -1, :VOCAB].float()

    def hidden(self, ids: Sequence[int]) -> torch.Tensor:
        """[H] what the LM head reads."""
        return self._output(ids).hidden_states[-1][0, -1]

    def embedding(self, token: int) -> torch.Tensor:
        """[H] of one id."""
        return self._model.get_input_embeddings().weight[token].detach()

    def _output(self, ids: Sequence[int]) -> Any:
        with torch.inference_mode():
            return self._model(input_ids=torch.tensor([ids]), use_cache=False, output_hidden_states=True)


@dataclass(frozen=True)
class Case:
    """A route, and the loop that says what it writes."""

    algorithm: str
    params: dict[str, Any]
    expected: Callable[[Sampling], Trace]
    models: int = 2
    body: dict[str, Any] = field(default_factory=dict)


class Cases:
    """All of them, over models and heads in one folder."""

    def __init__(self, folder: Path) -> None:
        directories = {
            "small": tiny_qwen3(folder / "small", seed=1, hidden=test_r2r.H),
            "large": tiny_qwen3(folder / "large", seed=2, layers=3, hidden=48),
            "huge": tiny_llama(folder / "huge", seed=3, tied=False),
        }
        self.directories = directories
        self.models = {name: Model(directory) for name, directory in directories.items()}
        self.folder = folder

    def all(self) -> dict[str, Case]:
        small = self.models["small"]
        unsure = self._middle(lambda ids: reference.nats(small(ids).tolist()))
        trust = str(self.folder / "trust.pth")
        deferring = str(self.folder / "defer.safetensors")
        confident = write_confidence(Path(trust), confidence_net(test_r2r.H))
        defers = write_defer(Path(deferring), test_r2r.H, bias=-0.5)
        trusted = self._middle(lambda ids: confident(small.hidden(ids)))
        deferred = self._middle(lambda ids: defers(small.hidden(ids)))
        of_trust: reference.Score = lambda ids: confident(small.hidden(ids))  # noqa: E731
        of_defer: reference.Score = lambda ids: defers(small.hidden(ids))  # noqa: E731
        tau = unsure / torch.tensor(VOCAB).log().item()
        weights = (0.5, 0.3, 0.2)
        likely = self._middle(lambda ids: float(small(ids).log_softmax(-1).max()))
        return {
            "none": self._ruled("none", {}, reference.none()),
            "entropy": self._ruled("entropy", {"threshold": unsure}, reference.entropy(unsure)),
            "rstitch": self._ruled("rstitch", {"tau": tau}, reference.rstitch(tau)),
            "citer": self._ruled(
                "citer", {"checkpoint": trust, "threshold": trusted}, reference.citer(of_trust, trusted)
            ),
            "r2r": self._router(),
            "collm": self._ruled(
                "collm", {"checkpoint": deferring, "threshold": deferred}, reference.collm(of_defer, deferred)
            ),
            "compose": self._ruled(
                "collm",
                {"checkpoint": deferring, "threshold": deferred, "mode": "compose"},
                reference.collm(of_defer, deferred, entry=small),
            ),
            "visit": self._ruled("every_n", {"shape": "visit", "n": 3}, reference.every_n("visit", 3)),
            "block": self._ruled("every_n", {"shape": "block", "n": 2}, reference.every_n("block", 2, 3), 3),
            "bernoulli": self._ruled("bernoulli", {"p": 0.4}, reference.bernoulli(0.4)),
            "me": self._ruled(
                "me", {"weights": list(weights)}, reference.me(weights), 3, first=reference.first_drawn(weights)
            ),
            "query": self._ruled(
                "query",
                {"source": "field", "threshold": 0.5},
                reference.stay(),
                first=reference.first_of_query("field", 0.5, 0.5),
                body={"route": {"score": 0.5}},
            ),
            "hidden": self._ruled(
                "query",
                {"source": "hidden", "checkpoint": trust, "threshold": 0.5},
                reference.query_hidden(of_trust, 0.5),
            ),
            "speculative": self._drafted("speculative", {"gamma": 4}, reference_drafts.speculative(), 4),
            "cascade": self._drafted(
                "cascade",
                {"mode": "speculative", "alpha": 0.98, "gamma": 4},
                reference_drafts.speculative_cascade("chow", 0.98),
                4,
            ),
            "chunk": self._judged({"mode": "chunk", "chunk": 4, "threshold": likely}, likely, 4),
            "sequence": self._judged({"mode": "sequence", "threshold": 0.0}, 0.0, 0),
        }

    def _ruled(
        self,
        algorithm: str,
        params: dict[str, Any],
        rule: Rule,
        models: int = 2,
        *,
        first: First = lambda *_: 0,
        body: dict[str, Any] | None = None,
    ) -> Case:
        route = [self.models[name] for name in NAMES[:models]]

        def expected(sampling: Sampling) -> Trace:
            return reference.generate(route, rule, PROMPT, sampling, (EOS,), 8, first)

        return Case(algorithm, params, expected, models, body or {})

    def _drafted(self, algorithm: str, params: dict[str, Any], takes: reference_drafts.Takes, gamma: int) -> Case:
        pair = [self.models["small"], self.models["large"]]
        return Case(algorithm, params, lambda given: reference_drafts.rounds(pair, takes, PROMPT, given, (EOS,), gamma))

    def _judged(self, params: dict[str, Any], threshold: float, chunk: int) -> Case:
        pair = [self.models["small"], self.models["large"]]
        passes = reference_drafts.mean(threshold)
        return Case(
            "cascade", params, lambda given: reference_drafts.cascade(pair, passes, PROMPT, given, (EOS,), chunk)
        )

    def _router(self) -> Case:
        small, net = self.models["small"], test_r2r.network()

        def probability(row: reference.Row) -> float:
            top = torch.tensor(row.logits).topk(test_r2r.TOP).values
            with torch.inference_mode():
                return float(net(small.hidden(row.ids), small.embedding(row.token), top).sigmoid())

        threshold = self._middle(
            lambda ids: probability(
                reference.Row(0, small(ids).tolist(), int(small(ids).argmax()), 0, 0, 0, list(ids), ())
            )
        )
        checkpoint = str(test_r2r.write(self.folder, net, threshold))

        def rule(row: reference.Row) -> reference.Decision:
            away = row.model == 0 and probability(row) >= reference.single(threshold)
            return reference.Decision(int(away), keep=row.model == 1)

        return self._ruled("r2r", {"checkpoint": checkpoint}, rule)

    def _middle(self, signal: Callable[[Sequence[int]], float]) -> float:
        """Between the signal's middle values along what the small model writes: routes then hand over about half of it."""
        alone = reference.generate(
            [self.models["small"]], reference.none(), PROMPT, Sampling(seed=0, temperature=0.0, max_tokens=12), (EOS,)
        )
        seen = sorted(signal([*PROMPT, *alone.tokens[:count]]) for count in range(len(alone.tokens)))
        return (seen[len(seen) // 2 - 1] + seen[len(seen) // 2]) / 2


def configuration(cases: Cases, routes: dict[str, Case]) -> str:
    """Of a daemon with all models and routes."""
    lines = []
    for name, path in cases.directories.items():
        lines += [f"[models.{name}]", f'path = "{path}"', 'dtype = "float32"']
    for name, case in routes.items():
        # Strings, numbers and lists are written as in JSON.
        params = ", ".join(f"{key} = {json.dumps(value)}" for key, value in case.params.items())
        lines += [f"[routes.by-{name}]", f"models = {json.dumps(NAMES[: case.models])}"]
        lines += [f'algorithm = "{case.algorithm}"', f"params = {{ {params} }}"]
    return "\n".join(lines)


async def check(
    session: aiohttp.ClientSession, name: str, case: Case, tokenizer: Tokenizer, fields: dict[str, Any]
) -> int:
    """One answer: its text, end, writers and hand-offs. Returns how many tokens others than the entry wrote."""
    status, body = await complete(session, f"by-{name}", **fields | case.body | {"prompt": PROMPT, "ignore_eos": False})
    assert status == 200, (name, body)
    trace = case.expected(Sampling(**fields))
    ended = trace.finish == "stop"
    assert body["choices"][0]["finish_reason"] == trace.finish, name
    assert body["choices"][0]["text"] == tokenizer.decode(trace.tokens[: len(trace.tokens) - ended]), name
    used = body["usage"]["route"]
    assert used["tokens"] == {model: trace.writers.count(n) for n, model in enumerate(NAMES[: case.models])}, name
    assert used["handoffs"] == len(trace.handoffs), name
    return len(trace.writers) - trace.writers.count(0)


async def test_every_algorithm(tmp_path: Path) -> None:
    cases = Cases(tmp_path)
    routes = cases.all()
    tokenizer = Tokenizer.load(cases.directories["small"])
    async with serving(tmp_path, configuration(cases, routes)) as daemon, daemon.session() as session:
        jobs = [(name, case, fields) for name, case in routes.items() for fields in REQUESTS]
        others = await asyncio.gather(*(check(session, name, case, tokenizer, fields) for name, case, fields in jobs))
        await daemon.idle()
    written = {name: 0 for name, _, _ in jobs}
    for (name, _, _), count in zip(jobs, others, strict=True):
        written[name] += count
    assert {name for name, count in written.items() if not count} == {"none"}, (
        "a rule that never hands over shows nothing"
    )
