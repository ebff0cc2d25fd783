"""How attention is cut, by the shape of a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from models.cuda.captured_shapes import Shapes
from models.cuda.tiles import TileShape, choose_tiles
from models.device_runner import BUCKETS

MULTIPROCESSOR = 227 << 10
"""Bytes of shared memory that a program may have on Hopper."""
SMALLEST = 99 << 10
"""The same on the smallest GPUs that are served (8.6 and 8.9)."""


def chosen(rows: int, logit_rows: int, **changes: Any) -> TileShape:
    settings: dict[str, Any] = {"group": 8, "kv_heads": 8, "head_dim": 128, "dtype": torch.bfloat16, "processors": 132}
    return choose_tiles(rows, logit_rows, **(settings | changes))


def cut(rows: int, logit_rows: int, **changes: Any) -> tuple[int, int, int, int]:
    tiles = chosen(rows, logit_rows, **changes)
    return tiles.query_rows, tiles.keys, tiles.warps, tiles.stages


FEW, RUNS, LARGE = (16, 128, 4, 3), (64, 64, 4, 5), (128, 64, 8, 2)


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        ((1, 1), FEW),
        ((64, 64), FEW),
        ((40, 20), FEW),
        ((128, 64), FEW),
        ((41, 20), RUNS),
        ((129, 65), RUNS),
        ((192, 192), RUNS),
        ((16, 0), RUNS),
        ((256, 1), RUNS),
        ((257, 257), LARGE),
    ],
)
def test_few_rows_of_a_request_have_small_tiles(step: tuple[int, int], expected: tuple[int, ...]) -> None:
    assert cut(*step) == expected
    assert chosen(*step).whole_blocks == (expected == LARGE)


@pytest.mark.parametrize(
    ("step", "expected"),
    [((64, 64), FEW), ((41, 14), FEW), ((120, 40), FEW), ((191, 64), RUNS), ((157, 16), RUNS), ((80, 8), RUNS)],
)
def test_the_graph_that_serves_a_step_has_its_cut(step: tuple[int, int], expected: tuple[int, ...]) -> None:
    assert cut(*Shapes(BUCKETS, extends=True).of(*step)) == expected


@pytest.mark.parametrize(
    ("group", "few", "runs"),
    [
        (1, FEW, FEW),
        (2, FEW, FEW),
        (4, FEW, (32, 64, 4, 5)),
        (5, FEW, RUNS),
        (7, FEW, RUNS),
        (16, (32, 128, 4, 3), (128, 64, 8, 5)),
        (64, (128, 128, 8, 3), (128, 64, 8, 5)),
    ],
)
def test_tiles_hold_the_query_heads_of_some_rows(group: int, few: tuple[int, ...], runs: tuple[int, ...]) -> None:
    assert cut(8, 8, group=group) == few
    assert cut(192, 64, group=group) == runs


def test_wide_heads_and_float32_do_not_ask_how_many_want_logits() -> None:
    for wanted in (1, 64, 128):
        assert cut(128, wanted, head_dim=256) == (32, 32, 4, 2)
        assert cut(300, wanted, head_dim=256) == (128, 32, 8, 2)
        assert cut(128, wanted, dtype=torch.float32) == (16, 32, 8, 2)
        assert cut(300, wanted, dtype=torch.float32) == (16, 32, 8, 2)


def shared_bytes(tiles: TileShape, group: int, head_dim: int, capability: int) -> int:
    """That a program asks for, by the compiler."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from models.cuda.kernels.paged_attention import _paged_attention as kernel

    pointers = {"qkv": "bf16", "keys": "bf16", "values": "bf16", "out": "bf16", "sums": "fp32", "scales": "fp32"}
    pointers |= dict.fromkeys(("tasks", "tickets", "positions", "page_table"), "i32")
    constants = {
        "HEADS": 8 * group,
        "KV_HEADS": 8,
        "HEAD_DIM": head_dim,
        "PAGE": 16,
        "WORDS": 8,
        "BLOCK_ROWS": tiles.query_rows,
        "BLOCK_KEYS": tiles.keys,
        "STAGES": tiles.stages,
        "WHOLE_BLOCKS": tiles.whole_blocks,
        "OVERLAP": False,
    }
    types = {name: f"*{kind}" for name, kind in pointers.items()} | {"table_stride": "i32", "scale": "fp32"}
    places = {name: (place,) for place, name in enumerate(kernel.arg_names)}
    aligned = [name for name in (*pointers, "table_stride") if name not in ("positions", "page_table")]
    source = ASTSource(
        kernel,
        {name: types.get(name, "constexpr") for name in places},
        {places[name]: value for name, value in constants.items()},
        {places[name]: [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    return int(triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).metadata.shared)


@pytest.mark.timeout(240)
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize(("capability", "most"), [(90, MULTIPROCESSOR), (80, SMALLEST)])
@pytest.mark.parametrize(
    ("group", "head_dim"), [(8, 128), *(pytest.param(*heads, marks=pytest.mark.slow) for heads in ((4, 64), (16, 128)))]
)
def test_small_steps_fit_onto_a_multiprocessor(group: int, head_dim: int, capability: int, most: int) -> None:
    pytest.importorskip("triton", minversion="3.9")
    for wanted in (64, 16):
        tiles = chosen(64, wanted, group=group, head_dim=head_dim)
        assert 0 < shared_bytes(tiles, group, head_dim, capability) <= most
