"""Page accounting of one KV pool: who holds which page. It knows page numbers only; the tensors are the runner's."""

from __future__ import annotations


class KvError(RuntimeError):
    """A page or slot was used against the rules: a bug in the caller, never a lack of pages."""


class KvPool:
    """Reference counts over `num_pages` pages.

    A page is *owned* while any slot holds it, *cached* while only the prefix cache holds it, *free* otherwise.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise KvError(f"num_pages is {num_pages}: a KV pool needs at least one page")
        self.num_pages = num_pages
        self._holders = [0] * num_pages
        self._published = bytearray(num_pages)
        # Taken from the end: page 0 goes out first.
        self._free = list(range(num_pages - 1, -1, -1))
        self._cached = 0

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Pages that only the prefix cache holds."""
        return self._cached

    @property
    def owned(self) -> int:
        """Pages that at least one slot holds, whether or not the prefix cache knows them too."""
        return self.num_pages - len(self._free) - self._cached

    def holders(self, page: int) -> int:
        """How many slots hold the page."""
        return self._holders[page]

    def is_published(self, page: int) -> bool:
        """Whether the prefix cache holds the page."""
        return bool(self._published[page])

    def allocate(self) -> int:
        """Take a free page for one slot. Raises KvError when there is none."""
        if not self._free:
            raise KvError("no free page: evict cached pages before allocating")
        page = self._free.pop()
        self._holders[page] = 1
        return page

    def retain(self, page: int) -> None:
        """Add a slot to a page that a slot or the prefix cache holds."""
        if self._holders[page] == 0:
            if not self._published[page]:
                raise KvError(f"page {page} is free and cannot be retained")
            self._cached -= 1
        self._holders[page] += 1

    def release(self, page: int) -> None:
        """Drop one slot from a page; it turns cached or free with the last. Raises KvError on a double free."""
        if self._holders[page] == 0:
            raise KvError(f"page {page} released twice")
        self._holders[page] -= 1
        if self._holders[page] == 0:
            if self._published[page]:
                self._cached += 1
            else:
                self._free.append(page)

    def publish(self, page: int) -> None:
        """Let the prefix cache hold a page that a slot holds."""
        if self._holders[page] == 0 or self._published[page]:
            raise KvError(f"page {page} cannot be published: it is {self._state(page)}")
        self._published[page] = 1

    def withdraw(self, page: int) -> None:
        """End the prefix cache's hold on a page that no slot holds: it is free then."""
        if self._holders[page] or not self._published[page]:
            raise KvError(f"page {page} cannot be withdrawn: it is {self._state(page)}")
        self._published[page] = 0
        self._cached -= 1
        self._free.append(page)

    def check(self) -> None:
        """Recount everything from the pages themselves. Raises KvError on an imbalance."""
        idle = [page for page in range(self.num_pages) if not self._holders[page]]
        free = sorted(page for page in idle if not self._published[page])
        if sorted(self._free) != free:
            raise KvError(f"free list holds {len(self._free)} pages, {len(free)} pages are free")
        if len(idle) - len(free) != self._cached:
            raise KvError(f"{self._cached} pages counted as cached, {len(idle) - len(free)} are")

    def _state(self, page: int) -> str:
        if self._holders[page]:
            return "owned and published" if self._published[page] else "owned"
        return "cached" if self._published[page] else "free"
