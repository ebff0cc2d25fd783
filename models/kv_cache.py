"""KV bookkeeping as a scheduler sees it: slots that grow, shrink and share prefixes. Pages stay behind this facade."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from models.batch import PageTable
from models.kv_pool import KvError, KvPool
from models.prefix_cache import CachedPage, PrefixCache


@dataclass(slots=True)
class _Slot:
    pages: list[int] = field(default_factory=list)
    chain: list[CachedPage] = field(default_factory=list)
    """Nodes of the leading pages that the prefix cache knows: pages[i] is chain[i].page."""


class KvCache:
    """Slots over one pool of `num_pages` pages of `page_size` tokens, with an optional prefix cache.

    A slot is one row of `page_table`. KV holds exactly the tokens fed: the caller counts them, and calls `commit` as
    they are computed. Every lack of pages is a False, every misuse a `KvError`.
    """

    def __init__(self, num_pages: int, page_size: int, max_slots: int, max_context: int, prefix_cache: bool) -> None:
        self.page_size = page_size
        self.max_context = max_context
        self._pool = KvPool(num_pages)
        self._prefixes = PrefixCache(self._pool, page_size) if prefix_cache else None
        self._slots: list[_Slot | None] = [None] * max_slots
        self._idle_slots = list(range(max_slots - 1, -1, -1))
        self.page_table: PageTable = np.zeros((max_slots, -(-max_context // page_size)), np.int32)
        self.on_pages: Callable[[int, int, Sequence[int]], None] = _nobody
        """Told of entries of the page table that hold something new: slot, index of the first one, page numbers."""

    @property
    def capacity_tokens(self) -> int:
        """Tokens that the whole pool holds."""
        return self._pool.num_pages * self.page_size

    def free_tokens(self) -> int:
        """Tokens for which pages can be had now, evicting cached ones."""
        return (self._pool.free + self._pool.cached) * self.page_size

    def counts(self) -> dict[str, int]:
        """Pages by state; free + cached + owned == total. A cached page that a slot uses counts as owned."""
        pool = self._pool
        return {"free": pool.free, "cached": pool.cached, "owned": pool.owned, "total": pool.num_pages}

    def open(self) -> int | None:
        """An empty slot, or None when all are taken."""
        if not self._idle_slots:
            return None
        slot = self._idle_slots.pop()
        self._slots[slot] = _Slot()
        return slot

    def match(self, slot: int, token_ids: Sequence[int]) -> int:
        """Attach the longest cached prefix to an empty slot.

        Returns:
            How many leading tokens have their KV; always fewer than len(token_ids), so that one is left to feed.
        """
        held = self._held(slot)
        if held.pages:
            raise KvError(f"slot {slot} is not empty: a prefix can only be attached before anything is reserved")
        if self._prefixes is None:
            return 0
        held.chain = self._prefixes.match(token_ids, len(token_ids) - 1)
        held.pages = [node.page for node in held.chain]
        for page in held.pages:
            self._pool.retain(page)
        self._prefixes.touch(held.chain)
        self._enter(slot, 0, held.pages)
        return len(held.pages) * self.page_size

    def reserve(self, slot: int, length: int) -> bool:
        """Make positions below `length` writable.

        Returns:
            False, with nothing changed, when there are too few pages even after evicting every cached one.
        """
        held = self._held(slot)
        if length > self.max_context:
            raise KvError(f"slot {slot}: length {length} is over the context of {self.max_context} tokens")
        count = len(held.pages)
        needed = -(-length // self.page_size) - count
        if needed <= 0:
            return True
        if needed > self._pool.free + self._pool.cached:
            return False
        if self._prefixes is not None and needed > self._pool.free:
            self._prefixes.evict(needed - self._pool.free)
        fresh = [self._pool.allocate() for _ in range(needed)]
        held.pages += fresh
        self._enter(slot, count, fresh)
        return True

    def truncate(self, slot: int, length: int) -> int:
        """Drop the KV of positions from `length` on.

        A page that the prefix cache knows is never written again: when `length` falls inside one, the slot is cut to
        that page's start instead.

        Returns:
            The length really kept: the caller feeds again from there.
        """
        held = self._held(slot)
        keep = -(-length // self.page_size)
        if keep > len(held.pages):
            raise KvError(f"slot {slot}: cannot truncate to {length}, only {len(held.pages)} pages are reserved")
        if length % self.page_size and keep <= len(held.chain):
            keep -= 1
            length = keep * self.page_size
        if keep < len(held.pages):
            self._release(slot, held, keep)
        return length

    def commit(self, slot: int, token_ids: Sequence[int], fed: int) -> None:
        """Publish the slot's pages that are full by now.

        Args:
            slot: the slot.
            token_ids: every id of prompt and output so far, at least `fed`.
            fed: how many of them have their KV computed: the step that fed them has ended.
        """
        if self._prefixes is None:
            return
        held = self._held(slot)
        done = len(held.chain)
        full = fed // self.page_size
        if full <= done:
            return
        if full > len(held.pages) or fed > len(token_ids):
            raise KvError(f"slot {slot}: {fed} tokens committed, {len(held.pages)} pages and {len(token_ids)} ids held")
        for index in range(done, full):
            self._publish(self._prefixes, slot, index, token_ids)
        self._prefixes.touch(held.chain[done:])

    def close(self, slot: int) -> None:
        """Give the slot and its pages back; published pages stay cached."""
        self._release(slot, self._held(slot), 0)
        self._slots[slot] = None
        self._idle_slots.append(slot)

    def flush(self) -> int:
        """Forget every cached page that no slot uses. Returns how many became free."""
        count = self._pool.cached
        if self._prefixes is not None:
            self._prefixes.evict(count)
        return count

    def check(self) -> None:
        """Recount pages from the slots. Raises KvError on an imbalance; cheap enough for idle moments."""
        holders = [0] * self._pool.num_pages
        for slot, held in enumerate(self._slots):
            pages = held.pages if held else []
            for page in pages:
                holders[page] += 1
            if self.page_table[slot, : len(pages)].tolist() != pages:
                raise KvError(f"slot {slot}: its page table row differs from the pages that it holds")
        for page, count in enumerate(holders):
            if self._pool.holders(page) != count:
                raise KvError(f"page {page} has {self._pool.holders(page)} holders by count, {count} slots hold it")
        self._pool.check()
        if self._prefixes is not None:
            self._prefixes.check()

    def _held(self, slot: int) -> _Slot:
        held = self._slots[slot]
        if held is None:
            raise KvError(f"slot {slot} is not open")
        return held

    def _publish(self, prefixes: PrefixCache, slot: int, index: int, token_ids: Sequence[int]) -> None:
        held = self._held(slot)
        parent = held.chain[-1] if held.chain else None
        start = index * self.page_size
        page = held.pages[index]
        node = prefixes.find(parent, token_ids, start)
        if node is None:
            node = prefixes.insert(parent, token_ids, start, page)
        elif node.page != page:
            # Another slot computed the same page first: share it, so that a slot holds its whole chain.
            self._pool.retain(node.page)
            self._pool.release(page)
            held.pages[index] = node.page
            self._enter(slot, index, [node.page])
        held.chain.append(node)

    def _enter(self, slot: int, first: int, pages: Sequence[int]) -> None:
        if pages:
            self.page_table[slot, first : first + len(pages)] = pages
            self.on_pages(slot, first, pages)

    def _release(self, slot: int, held: _Slot, keep: int) -> None:
        for page in reversed(held.pages[keep:]):
            self._pool.release(page)
        dropped = held.chain[keep:]
        self.page_table[slot, keep : len(held.pages)] = 0
        del held.pages[keep:]
        del held.chain[keep:]
        if self._prefixes is not None and dropped:
            self._prefixes.touch(dropped)


def _nobody(slot: int, first: int, pages: Sequence[int]) -> None:
    del slot, first, pages
