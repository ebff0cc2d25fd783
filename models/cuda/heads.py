"""The attention heads that one device holds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Heads that one device holds, and how they are normed and turned."""

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    eps: float
