"""Prefix cache over full KV pages: a tree whose edges are the token ids of one page, least recently used leaf out.

The key of a page is its parent page's identity plus its own ids, compared in full, so two different prefixes can never
be taken for each other. Keys depend on token ids alone: who wrote a token makes no difference.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from models.kv_pool import KvError, KvPool


@dataclass(slots=True, eq=False)
class CachedPage:
    """A node of the tree: one page whose KV is computed."""

    serial: int
    page: int
    parent: CachedPage | None
    ids: bytes
    last_used: int
    children: int = 0

    @property
    def key(self) -> tuple[int, bytes]:
        """What the page is found by."""
        return (self.parent.serial if self.parent else 0, self.ids)


class PrefixCache:
    """Finds, keeps and evicts computed pages of one `KvPool`.

    Slots hold whole chains from the root, so an ancestor of an owned page is owned, and every page that the pool counts
    as cached can be evicted, leaves first.
    """

    def __init__(self, pool: KvPool, page_size: int) -> None:
        self._pool = pool
        self._page_size = page_size
        self._nodes: dict[tuple[int, bytes], CachedPage] = {}
        self._serial = 0
        self._clock = 0
        # (last_used, serial, node): entries go stale when a leaf is used again; eviction skips those.
        self._leaves: list[tuple[int, int, CachedPage]] = []

    def __len__(self) -> int:
        return len(self._nodes)

    def match(self, token_ids: Sequence[int], limit: int) -> list[CachedPage]:
        """The longest cached chain of full pages within the first `limit` ids, from the root."""
        chain: list[CachedPage] = []
        parent: CachedPage | None = None
        for start in range(0, limit - self._page_size + 1, self._page_size):
            node = self.find(parent, token_ids, start)
            if node is None:
                break
            chain.append(node)
            parent = node
        return chain

    def find(self, parent: CachedPage | None, token_ids: Sequence[int], start: int) -> CachedPage | None:
        """The page below `parent` that holds the ids from `start` on, if any."""
        return self._nodes.get((parent.serial if parent else 0, self._ids(token_ids, start)))

    def insert(self, parent: CachedPage | None, token_ids: Sequence[int], start: int, page: int) -> CachedPage:
        """Publish a slot's computed page below `parent`; `find` must have returned None for it."""
        self._serial += 1
        node = CachedPage(self._serial, page, parent, self._ids(token_ids, start), self._clock)
        self._pool.publish(page)
        self._nodes[node.key] = node
        if parent is not None:
            parent.children += 1
        return node

    def touch(self, chain: Sequence[CachedPage]) -> None:
        """Mark a chain as just used; call it after its pages changed hands, so that idle leaves become evictable."""
        self._clock += 1
        for node in chain:
            node.last_used = self._clock
        if chain:
            self._offer(chain[-1])

    def evict(self, count: int) -> None:
        """Free `count` pages, least recently used leaves first; at least that many must be cached."""
        while count:
            last_used, _, node = heapq.heappop(self._leaves)
            if node.last_used == last_used and self._evictable(node):
                self._remove(node)
                count -= 1

    def check(self) -> None:
        """Raises KvError when the tree and the pool disagree, or a page could never be evicted."""
        children: dict[int, int] = {}
        for node in self._nodes.values():
            if not self._pool.is_published(node.page):
                raise KvError(f"prefix cache knows page {node.page}, which the pool calls unpublished")
            if node.parent is not None:
                children[node.parent.serial] = children.get(node.parent.serial, 0) + 1
        offered = {node.serial for last_used, _, node in self._leaves if node.last_used == last_used}
        for node in self._nodes.values():
            if children.get(node.serial, 0) != node.children:
                raise KvError(f"prefix cache counts {node.children} children of page {node.page}")
            if self._evictable(node) and node.serial not in offered:
                raise KvError(f"cached page {node.page} is out of eviction's reach")

    def _remove(self, node: CachedPage) -> None:
        del self._nodes[node.key]
        self._pool.withdraw(node.page)
        parent = node.parent
        if parent is not None:
            parent.children -= 1
            self._offer(parent)

    def _offer(self, node: CachedPage) -> None:
        if not self._evictable(node):
            return
        heapq.heappush(self._leaves, (node.last_used, node.serial, node))
        if len(self._leaves) > 2 * len(self._nodes) + 64:
            self._leaves = [(n.last_used, n.serial, n) for n in self._nodes.values() if self._evictable(n)]
            heapq.heapify(self._leaves)

    def _evictable(self, node: CachedPage) -> bool:
        return node.children == 0 and self._nodes.get(node.key) is node and self._pool.holders(node.page) == 0

    def _ids(self, token_ids: Sequence[int], start: int) -> bytes:
        return array("I", token_ids[start : start + self._page_size]).tobytes()
