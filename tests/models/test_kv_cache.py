"""Slots, pages and shared prefixes: contents stay right and pages balance whatever the order of calls."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from models.kv_cache import KvCache
from models.kv_pool import KvError, KvPool

PAGE = 4


def cache(pages: int = 8, slots: int = 4, context: int = 64, prefixes: bool = True) -> KvCache:
    return KvCache(pages, PAGE, slots, context, prefixes)


def fill(kv: KvCache, ids: list[int]) -> int:
    """A slot with all of `ids` fed and committed."""
    slot = kv.open()
    assert slot is not None
    kv.match(slot, ids)
    assert kv.reserve(slot, len(ids))
    kv.commit(slot, ids, len(ids))
    return slot


def test_a_second_request_attaches_the_full_pages() -> None:
    kv = cache()
    ids = list(range(10))
    first = fill(kv, ids)
    second = kv.open()
    assert second is not None
    assert kv.match(second, [*ids[:9], 77]) == 8
    assert kv.page_table[first, :2].tolist() == kv.page_table[second, :2].tolist()
    assert kv.counts() == {"free": 5, "cached": 0, "owned": 3, "total": 8}


def test_one_token_is_always_left_to_feed() -> None:
    kv = cache()
    kv.close(fill(kv, list(range(8))))
    slot = kv.open()
    assert slot is not None
    assert kv.match(slot, list(range(8))) == 4


def test_only_fed_tokens_are_published() -> None:
    kv = cache()
    slot = kv.open()
    assert slot is not None
    ids = list(range(12))
    assert kv.reserve(slot, 12)
    kv.commit(slot, ids, 7)
    kv.close(slot)
    other = kv.open()
    assert other is not None
    assert kv.match(other, ids) == 4
    assert kv.counts()["cached"] == 0


def test_prefixes_with_equal_pages_at_other_places_differ() -> None:
    kv = cache()
    kv.close(fill(kv, [1] * 4 + [2] * 4 + [9]))
    slot = kv.open()
    assert slot is not None
    assert kv.match(slot, [2] * 4 + [1] * 4 + [9]) == 0


def test_lack_of_pages_changes_nothing() -> None:
    kv = cache(pages=4)
    slot = fill(kv, list(range(9)))
    other = kv.open()
    assert other is not None
    before = kv.counts()
    assert not kv.reserve(other, 5)
    assert kv.counts() == before
    assert kv.reserve(other, 4)
    kv.close(slot)
    assert kv.reserve(other, 16)
    kv.check()


def test_least_recently_used_leaf_goes_first() -> None:
    kv = cache(pages=4, slots=2)
    for first in (10, 20, 30):
        kv.close(fill(kv, [first] * 4))
    slot = kv.open()
    assert slot is not None
    assert kv.match(slot, [10] * 5) == 4
    kv.close(slot)
    slot = kv.open()
    assert slot is not None
    assert kv.reserve(slot, 8)
    kv.close(slot)
    hits = {}
    for first in (10, 20, 30):
        slot = kv.open()
        assert slot is not None
        hits[first] = kv.match(slot, [first] * 5)
        kv.close(slot)
    assert hits == {10: 4, 20: 0, 30: 4}


def test_a_parent_outlives_its_children() -> None:
    kv = cache(pages=4, slots=2)
    kv.close(fill(kv, [1] * 4 + [2] * 4 + [3] * 4))
    slot = kv.open()
    assert slot is not None
    assert kv.reserve(slot, 12)
    other = kv.open()
    assert other is not None
    assert kv.match(other, [1] * 4 + [2] * 5) == 4


def test_pages_computed_twice_are_shared_afterwards() -> None:
    kv = cache()
    first, second = kv.open(), kv.open()
    assert first is not None
    assert second is not None
    ids = list(range(8))
    for slot in (first, second):
        assert kv.reserve(slot, 8)
    assert kv.counts()["owned"] == 4
    for slot in (first, second):
        kv.commit(slot, ids, 8)
    assert kv.counts()["owned"] == 2
    assert kv.page_table[first, :2].tolist() == kv.page_table[second, :2].tolist()
    kv.check()


def test_truncating_into_a_published_page_drops_to_its_start() -> None:
    kv = cache()
    slot = fill(kv, list(range(10)))
    assert kv.truncate(slot, 9) == 9
    assert kv.truncate(slot, 8) == 8
    assert kv.truncate(slot, 6) == 4
    assert kv.counts() == {"free": 6, "cached": 1, "owned": 1, "total": 8}
    assert kv.truncate(slot, 3) == 0
    kv.check()


def test_truncating_an_unpublished_page_keeps_every_token() -> None:
    kv = cache(prefixes=False)
    slot = kv.open()
    assert slot is not None
    assert kv.reserve(slot, 10)
    assert kv.truncate(slot, 6) == 6
    assert kv.counts()["owned"] == 2


def test_misuse_is_an_error() -> None:
    kv = cache()
    slot = fill(kv, list(range(6)))
    with pytest.raises(KvError, match="not empty"):
        kv.match(slot, [1, 2])
    with pytest.raises(KvError, match="context of 64"):
        kv.reserve(slot, 65)
    with pytest.raises(KvError, match="cannot truncate to 9"):
        kv.truncate(slot, 9)
    with pytest.raises(KvError, match="12 tokens committed"):
        kv.commit(slot, list(range(12)), 12)
    kv.close(slot)
    with pytest.raises(KvError, match="not open"):
        kv.close(slot)


def test_slots_run_out() -> None:
    kv = cache(slots=1)
    slot = kv.open()
    assert slot is not None
    assert kv.open() is None
    kv.close(slot)
    assert kv.open() == slot


def test_flush_empties_the_cache_but_not_the_slots() -> None:
    kv = cache()
    kv.close(fill(kv, [1] * 8))
    slot = fill(kv, [2] * 8)
    assert kv.flush() == 2
    assert kv.counts() == {"free": 6, "cached": 0, "owned": 2, "total": 8}
    kv.close(slot)
    assert kv.free_tokens() == kv.capacity_tokens == 32


def test_pool_refuses_double_frees() -> None:
    pool = KvPool(2)
    page = pool.allocate()
    pool.release(page)
    with pytest.raises(KvError, match="released twice"):
        pool.release(page)
    with pytest.raises(KvError, match="cannot be retained"):
        pool.retain(page)
    with pytest.raises(KvError, match="it is free"):
        pool.publish(page)
    assert (pool.allocate(), pool.allocate()) != (page, page)
    with pytest.raises(KvError, match="no free page"):
        pool.allocate()


class KvMachine(RuleBasedStateMachine):
    """Random calls against a model of what each page holds: (page) -> ids written there, from the sequence's start."""

    slots = Bundle("slots")

    def __init__(self) -> None:
        super().__init__()
        self.kv = KvCache(12, PAGE, 5, 40, True)
        self.ids: dict[int, list[int]] = {}
        self.content: dict[int, list[tuple[int, ...]]] = {}
        self.told = np.full_like(self.kv.page_table, -1)
        self.kv.on_pages = self._hear

    def _hear(self, slot: int, first: int, pages: Sequence[int]) -> None:
        assert pages
        self.told[slot, first : first + len(pages)] = pages

    def write(self, slot: int, start: int, end: int) -> None:
        """Feed positions start..end: each page position then stands for one exact prefix."""
        for position in range(start, end):
            page = int(self.kv.page_table[slot, position // PAGE])
            cells = self.content.setdefault(page, [()] * PAGE)
            cells[position % PAGE] = tuple(self.ids[slot][: position + 1])

    @rule(target=slots, prompt=st.lists(st.integers(0, 1), min_size=1, max_size=20))
    def open(self, prompt: list[int]) -> object:
        slot = self.kv.open()
        if slot is None:
            assert len(self.ids) == 5
            return multiple()
        present = self.kv.match(slot, prompt)
        assert present < len(prompt)
        if not self.kv.reserve(slot, len(prompt)):
            self.kv.close(slot)
            return multiple()
        self.ids[slot] = list(prompt)
        self.write(slot, present, len(prompt))
        self.kv.commit(slot, self.ids[slot], len(prompt))
        return slot

    @rule(slot=slots, more=st.lists(st.integers(0, 1), min_size=1, max_size=6), publish=st.booleans())
    def extend(self, slot: int, more: list[int], publish: bool) -> None:
        if slot not in self.ids or len(self.ids[slot]) + len(more) > 40:
            return
        fed = len(self.ids[slot])
        before = self.kv.counts()
        if not self.kv.reserve(slot, fed + len(more)):
            assert self.kv.counts() == before
            return
        self.ids[slot] += more
        self.write(slot, fed, len(self.ids[slot]))
        if publish:
            self.kv.commit(slot, self.ids[slot], len(self.ids[slot]))

    @rule(slot=slots, share=st.floats(0, 1))
    def truncate(self, slot: int, share: float) -> None:
        if slot not in self.ids:
            return
        length = int(share * len(self.ids[slot]))
        kept = self.kv.truncate(slot, length)
        assert length - PAGE < kept <= length
        del self.ids[slot][kept:]

    @rule(slot=consumes(slots))
    def close(self, slot: int) -> None:
        if slot in self.ids:
            self.kv.close(slot)
            del self.ids[slot]

    @invariant()
    def every_slot_reads_its_own_prefix(self) -> None:
        for slot, ids in self.ids.items():
            for position in range(len(ids)):
                page = int(self.kv.page_table[slot, position // PAGE])
                assert self.content[page][position % PAGE] == tuple(ids[: position + 1])

    @invariant()
    def whoever_listens_knows_the_page_table(self) -> None:
        for slot, ids in self.ids.items():
            count = -(-len(ids) // PAGE)
            assert self.told[slot, :count].tolist() == self.kv.page_table[slot, :count].tolist()

    @invariant()
    def pages_balance(self) -> None:
        counts = self.kv.counts()
        assert counts["free"] + counts["cached"] + counts["owned"] == counts["total"]
        self.kv.check()

    def teardown(self) -> None:
        for slot in list(self.ids):
            self.kv.close(slot)
        assert self.kv.counts()["owned"] == 0
        slot = self.kv.open()
        assert slot is not None
        # Whatever is cached can be evicted.
        assert self.kv.reserve(slot, 40)
        self.kv.check()


TestKvMachine = KvMachine.TestCase
TestKvMachine.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
