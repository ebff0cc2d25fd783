"""Speculative decoding and cascades by the whole daemon in its processes, with the built-in pair of models."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp

from tests.daemon.instance import complete, serving, stream

CONFIG = """
[models.small]
path = "builtin:small"
[models.large]
path = "builtin:large"
[routes.spec]
models = ["small", "large"]
algorithm = "speculative"
params = { gamma = 5 }
[routes.whole]
models = ["small", "large"]
algorithm = "cascade"
params = { mode = "sequence", threshold = -0.5 }
[routes.never]
models = ["small", "large"]
algorithm = "cascade"
params = { mode = "sequence", threshold = 0.0 }
[routes.deferring]
models = ["small", "large"]
algorithm = "cascade"
params = { mode = "speculative", alpha = 1.0 }
"""
PROMPT = "A school sends 5 classes with 15 students each and 6 teachers to the museum."


async def test_drafts_in_the_whole_daemon(tmp_path: Path) -> None:
    async with serving(tmp_path, CONFIG) as daemon, daemon.session() as session:
        await _speculative_answers_are_the_large_models(session)
        await daemon.idle()
        await _cascades_go_by_confidence(session)
        await daemon.idle()


async def _speculative_answers_are_the_large_models(session: aiohttp.ClientSession) -> None:
    for fields in ({"temperature": 0}, {"temperature": 1.0, "seed": 7, "top_p": 0.95}):
        fields |= {"max_tokens": 48, "prompt": PROMPT}
        _, alone = await complete(session, "large", **fields)
        (_, whole), seen = await asyncio.gather(complete(session, "spec", **fields), stream(session, "spec", **fields))
        assert whole["choices"][0]["text"] == seen.text == alone["choices"][0]["text"]
        assert whole["usage"]["completion_tokens"] == 48
        route = whole["usage"]["route"]
        assert route["tokens"]["small"] == route["accepted"] > 20
        assert route["accepted"] < route["drafted"] == route["forwards"]["small"]
        # Rounds, each with a token of the large model's own; the last one may be cut short, and the prompt is read ahead.
        rounds = route["tokens"]["large"]
        assert rounds <= route["forwards"]["large"] <= rounds + 2
        assert route["forwards"]["large"] < 24 < alone["usage"]["route"]["forwards"]["large"] == 48


async def _cascades_go_by_confidence(session: aiohttp.ClientSession) -> None:
    fields = {"temperature": 0, "max_tokens": 24, "prompt": PROMPT}
    bodies = {}
    for model in ("small", "large", "whole", "never", "deferring"):
        status, bodies[model] = await complete(session, model, **fields)
        assert status == 200, bodies[model]
    text = {model: body["choices"][0]["text"] for model, body in bodies.items()}
    route = {model: body["usage"]["route"] for model, body in bodies.items()}
    assert text["never"] == text["large"]
    assert route["never"]["tokens"] == {"small": 0, "large": 24}
    assert text["whole"] in (text["small"], text["large"])
    # Nothing is deferred: every draft stays, and each round gets one token of the large model's.
    assert route["deferring"]["accepted"] == route["deferring"]["drafted"] == route["deferring"]["tokens"]["small"]
    async with session.get("/metrics") as answer:
        page = await answer.text()
    assert sum(route[model]["drafted"] for model in ("whole", "never", "deferring")) > 24
    drafted = [line for line in page.splitlines() if line.startswith("trouterd_worker_drafted_total{")]
    assert any('model="small"' in line and float(line.split()[-1]) > 100 for line in drafted)
