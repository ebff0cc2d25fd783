"""The router head's kernels against torch, on a CUDA device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from algorithms.base import RouteContext, StepResult
from algorithms.r2r import R2REntry, R2RParams
from models.cuda.router_head import largest
from tests.models.cuda.router import Sizes, router_file

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]

V = 151_669


def entry(path: Path, sizes: Sizes, embedding: torch.Tensor, dtype: str) -> R2REntry:
    context = RouteContext(("small", "large"), 0, V, sizes.hidden, torch.device("cuda"), embedding)
    return R2REntry(context, R2RParams(checkpoint=str(path), dtype=dtype))


def step(rows: int, hidden: int) -> StepResult:
    generator = torch.Generator("cuda").manual_seed(rows)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda")

    return StepResult(
        logits=normal(rows, V + 3)[:, :V] * 3,
        hidden=normal(rows, hidden).bfloat16(),
        tokens=torch.randint(0, V, (rows,), generator=generator, device="cuda"),
        index=torch.zeros(rows, dtype=torch.int64, device="cuda"),
        seed=torch.zeros(rows, dtype=torch.int64, device="cuda"),
        choice=torch.zeros(rows, dtype=torch.int64, device="cuda"),
        params={"threshold": torch.full((rows,), -1.0, device="cuda")},
        state=[{} for _ in range(rows)],
    )


@pytest.mark.parametrize("rows", [1, 8, 64, 200])
@pytest.mark.parametrize("width", [V, 300])
def test_largest(rows: int, width: int) -> None:
    logits = torch.randn((rows, width + 5), device="cuda")[:, :width]
    logits[0] = 1.0
    logits[-1, 150:] = -torch.inf
    for count in (1, 100):
        assert torch.equal(largest(logits, count), logits.topk(count).values)


@pytest.mark.parametrize("hidden", [1024, 1536])
def test_head_is_as_close_to_float32_as_torch(tmp_path: Path, hidden: int) -> None:
    sizes = Sizes(hidden, width=1024, blocks=6)
    embedding = torch.randn((V, hidden), device="cuda").bfloat16()
    path = router_file(tmp_path / "router.pt", sizes, threshold=0.35)
    half, full = (entry(path, sizes, embedding, dtype) for dtype in ("bfloat16", "float32"))
    head = half._router.head
    assert head is not None
    assert full._router.head is None
    for rows in (1, 2, 7, 8, 9, 16, 17, 33, 64):
        given = step(rows, hidden)
        ours = half.probabilities(given)
        for _ in range(5):
            assert torch.equal(half.probabilities(given), ours)
        assert half.route(given).tolist() == (ours >= 0.35).long().tolist()
        half._router.head = None
        theirs, exact = half.probabilities(given), full.probabilities(given)
        half._router.head = head
        assert (ours - exact).abs().max() < 1.5 * (theirs - exact).abs().max() + 0.01
        assert rows < 8 or exact.std() > 0.02


def test_a_captured_head_equals_the_eager_one(tmp_path: Path) -> None:
    """Replays back to back: each kernel may start while the one ahead of it ends."""
    sizes = Sizes(1024, width=1024, blocks=6)
    embedding = torch.randn((V, 1024), device="cuda").bfloat16()
    side = entry(router_file(tmp_path / "router.pt", sizes, threshold=0.35), sizes, embedding, "bfloat16")
    given = step(8, 1024)
    expected = side.probabilities(given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = side.probabilities(given)
    logits, others = given.logits.clone(), given.logits.roll(1, 0)
    for _ in range(50):
        given.logits.copy_(others)
        graph.replay()
        given.logits.copy_(logits)
        graph.replay()
    assert torch.equal(found, expected)
