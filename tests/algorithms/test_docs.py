"""docs/algorithms.md: every built-in is described as it is, and the examples run."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.inspect import FloatType, IntType, LiteralType, Metadata, type_info

from algorithms.registry import load, names, numeric_params, validate_params
from ipc.messages import Sampling
from tests.algorithms.reference import Decision, generate, probabilities
from tests.algorithms.steps import quick, side, step
from tests.harness import Cluster
from tests.worker.cousins import cousin
from tests.worker.lookup import LookupModel, LookupRunner
from trouterd.config import Route

DOCUMENT = Path(__file__).parents[2] / "docs" / "algorithms.md"
TEXT = DOCUMENT.read_text("utf-8")


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


def section(name):
    return re.split(r"^##", TEXT.split(f"\n### {name}\n")[1], flags=re.MULTILINE)[0]


def described(field):
    """The type cell of a parameter, for numbers and choices."""
    declared = type_info(field.type)
    declared = declared.type if isinstance(declared, Metadata) else declared
    if isinstance(declared, LiteralType):
        return set(declared.values)
    if isinstance(declared, FloatType | IntType):
        kind = "number" if isinstance(declared, FloatType) else "integer"
        return {kind, f">= {declared.ge}" if declared.le is None else f"{declared.ge} to {declared.le}"}
    return None


@pytest.mark.parametrize("name", names())
def test_parameter_tables(name):
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \|", section(name), re.MULTILINE)
    fields = {field.encode_name: field for field in msgspec.structs.fields(load(name).params)}
    assert [row[0] for row in rows] == list(fields)
    for parameter, cell, default in rows:
        field = fields[parameter]
        assert described(field) in (None, set(cell.split(", "))), parameter
        assert default == ("required" if field.required else f"`{field.default}`"), parameter
    assert f"`{name}`" in TEXT.split("## Parameters")[0]


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    folder = tmp_path_factory.mktemp("examples")
    for block in blocks("python"):
        (folder / block.splitlines()[0].removeprefix("# ")).write_text(block)
    return folder


def test_routes_of_the_document_are_valid(examples):
    routes = [route for block in blocks("toml") for route in tomllib.loads(block).get("routes", {}).values()]
    assert len(routes) == 4
    for route in (msgspec.convert(route, Route) for route in routes):
        validate_params(load(route.algorithm, examples), route.params, route.models)


@quick
@given(threshold=st.floats(0, 1), warmup=st.integers(0, 12), seed=st.integers(0, 2**32))
def test_both_forms_of_the_example_agree(examples, threshold, warmup, seed):
    params = {"threshold": threshold, "warmup": warmup}
    logits = 3 * torch.randn(16, 9, generator=torch.Generator().manual_seed(seed))
    plain, rows = (side(load(name, examples), params, 0, vocab=9) for name in ("unsure.py", "unsure_rows.py"))
    assert (plain.pure, rows.pure) == (False, True)
    given_step = step(logits, numeric_params(plain.params))
    destinations = rows.route(given_step).tolist()
    assert plain.route(given_step).tolist() == destinations
    confident = logits.softmax(dim=-1).amax(dim=-1) >= torch.tensor(threshold, dtype=torch.float32)
    assert destinations == [int(t >= warmup and not confident[t]) for t in range(16)]


@pytest.mark.parametrize("name", ["unsure.py", "unsure_rows.py"])
async def test_the_example_serves_requests(examples, name):
    models = {"small": LookupModel(1), "large": LookupModel(2)}
    route = Route(models=list(models), algorithm=str(examples / name), params={"threshold": 0.5, "warmup": 4})

    def rule(row):
        if row.model == 1:
            return Decision(0, keep=True)
        return Decision(int(row.index >= 4 and max(probabilities(row.logits)) < 0.5), keep=False)

    runners = {model: LookupRunner(table) for model, table in models.items()}
    async with Cluster(runners, {"demo": route}, eos_ids=frozenset()).running() as workers:
        answer = await workers.generate("demo", [3, 1, 4], max_tokens=30)
        await workers.settled()
    trace = generate(list(models.values()), rule, [3, 1, 4], Sampling(seed=0, max_tokens=30, temperature=0.0))
    assert (answer.tokens, answer.writers) == (trace.tokens, trace.writers)
    assert sum(answer.writers[4:]) > 0


async def test_the_example_with_drafts_writes_what_the_large_model_writes(examples):
    models = {"large": LookupModel(1)}
    models["small"] = cousin(models["large"], 5, 0.7)
    route = Route(models=["small", "large"], algorithm=str(examples / "patient.py"))
    runners = {model: LookupRunner(table) for model, table in models.items()}
    async with Cluster(runners, {"demo": route}, eos_ids=frozenset()).running() as workers:
        answers = [await workers.generate(name, [3, 1, 4], max_tokens=30) for name in ("demo", "large")]
        await workers.settled()
    assert answers[0].tokens == answers[1].tokens
    sizes = {len(message.scores) for message in workers.trace if message.destination == workers.names.index("large")}
    assert len(sizes) > 2
    assert 0 < answers[0].accepted < answers[0].drafted
