"""The router head's kernels against torch, on the CPU through Triton's interpreter; run by test_interpreted.py.

In float32: the interpreter has no products of bfloat16.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

assert os.environ.get("TRITON_INTERPRET") == "1", "run test_interpreted.py"

from algorithms.base import RouteContext, StepResult
from algorithms.r2r import R2REntry, R2RParams
from models.cuda import router_head
from models.cuda.kernels.top_values import slots_of, top_values
from tests.models.cuda.router import Sizes, router_file

V, TOP = 5000, 100


def logits(kind: str, rows: int, width: int) -> torch.Tensor:
    """Rows of wider ones."""
    x = torch.randn((rows, width + 3), generator=torch.Generator().manual_seed(width))[:, :width] * 5
    if kind == "equal":
        x[:] = 2.5
        x[1] = -torch.inf
    elif kind == "crowded":
        # As many equal ones at the border as have no room, and all large ones in one chunk.
        x[:, 7 : width // 2] = 3.0
        x[0, 1:6] = torch.tensor([9.0, 8.0, 7.0, 8.0, 9.0])
    elif kind == "masked":
        x[:, TOP // 2 :] = -torch.inf
        x[1, 4] = torch.inf
    elif kind == "negative":
        x = -x.abs() - 1e-30
        x[0, ::2] = -0.0
        x[0, 1::2] = 0.0
    return x


@pytest.mark.parametrize("kind", ["normal", "equal", "crowded", "masked", "negative"])
@pytest.mark.parametrize(
    ("width", "count"),
    [(130, 100), (4096, 1), *(pytest.param(*size, marks=pytest.mark.slow) for size in ((5000, 100), (4097, 200)))],
)
def test_top_values(kind: str, width: int, count: int) -> None:
    count = min(count, width)
    x = logits(kind, 3, width)
    found = top_values(x, count)
    assert found.shape == (3, slots_of(count))
    assert torch.equal(found[:, :count], x.topk(count).values)
    assert not found[:, count:].any()
    assert torch.equal(router_head.largest(x, count), found[:, :count])


def entry(path: Path, sizes: Sizes, embedding: torch.Tensor, **params: Any) -> R2REntry:
    context = RouteContext(("small", "large"), 0, V, sizes.hidden, torch.device("cpu"), embedding)
    return R2REntry(context, R2RParams(checkpoint=str(path), **params))


def step(rows: int, hidden: int, threshold: float) -> StepResult:
    generator = torch.Generator().manual_seed(rows)
    params = torch.full((rows, 2), threshold)
    return StepResult(
        logits=torch.randn((rows, V), generator=generator) * 3,
        hidden=torch.randn((rows, hidden), generator=generator),
        tokens=torch.randint(0, V, (2 * rows,), generator=generator)[::2],
        index=torch.zeros(rows, dtype=torch.int64),
        seed=torch.zeros(rows, dtype=torch.int64),
        choice=torch.zeros(rows, dtype=torch.int64),
        params={"threshold": params[:, 1]},
        state=[{} for _ in range(rows)],
    )


@contextmanager
def torch_only(side: R2REntry) -> Iterator[None]:
    head, side._router.head = side._router.head, None
    yield
    side._router.head = head


@pytest.mark.parametrize(
    ("rows", "sizes"),
    [
        (1, Sizes(512, blocks=1)),
        pytest.param(8, Sizes(512, expansion=2), marks=pytest.mark.slow),
        pytest.param(13, Sizes(512, blocks=1, expansion=1), marks=pytest.mark.slow),
    ],
)
def test_head_equals_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int, sizes: Sizes) -> None:
    monkeypatch.setattr(router_head, "_DTYPE", torch.float32)
    embedding = torch.randn((V, sizes.hidden), generator=torch.Generator().manual_seed(9))
    side = entry(router_file(tmp_path / "router.pt", sizes, threshold=0.08), sizes, embedding)
    assert side._router.head is not None
    given = step(rows, sizes.hidden, -1.0)
    p = side.probabilities(given)
    with torch_only(side):
        expected = side.probabilities(given)
    assert p.dtype == torch.float32
    assert (p - expected).abs().max() < 1e-5
    assert rows == 1 or expected.std() > 0.01
    assert side.route(given).tolist() == (p >= 0.08).long().tolist()
    assert rows == 1 or len(set(side.route(given).tolist())) == 2
    median = float(p.median())
    assert side.route(step(rows, sizes.hidden, median)).tolist() == (p >= median).long().tolist()


def test_rows_without_values_meet_no_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a worker tries a route at its start: a kernel would read from address 0, which ends all processes on a shared GPU."""
    monkeypatch.setattr(router_head, "_DTYPE", torch.float32)
    sizes = Sizes(512, blocks=1)
    side = entry(router_file(tmp_path / "router.pt", sizes, threshold=0.08), sizes, torch.zeros((V, sizes.hidden)))
    assert side._router.head is not None

    def launched(*_: object, **__: object) -> None:
        raise AssertionError("a kernel was launched")

    monkeypatch.setattr("triton.runtime.interpreter.GridExecutor.__call__", launched)
    with FakeTensorMode(allow_non_fake_inputs=True):
        answer = side.route(step(3, sizes.hidden, 0.5))
    assert answer.shape == (3,)
    assert answer.dtype == torch.int64


@pytest.mark.parametrize(
    ("sizes", "fits"),
    [
        (Sizes(512), True),
        (Sizes(1536, width=1024, expansion=4, blocks=1), True),
        (Sizes(500), False),
        (Sizes(512, width=96), False),
        (Sizes(512, width=2048, blocks=1, expansion=1), False),
        (Sizes(512, normalize=True), False),
        (Sizes(512, last=256), False),
    ],
)
def test_what_fits(tmp_path: Path, sizes: Sizes, fits: bool) -> None:
    path = router_file(tmp_path / "router.pt", sizes, threshold=0.4)
    embedding = torch.zeros((V, sizes.hidden))
    assert (entry(path, sizes, embedding, dtype="bfloat16")._router.head is not None) == fits
    assert entry(path, sizes, embedding)._router.head is None
