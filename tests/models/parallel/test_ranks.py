"""Frames, packed rows, and ranks that are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from models.config import ModelError
from models.parallel import ranks
from models.parallel.exchange import layout_of, pack_rows, pack_runs, packed_size, unpack_rows, unpack_runs
from models.parallel.leader import SplitModel
from models.parallel.link import (
    MAX_FRAME,
    Allocate,
    Bytes,
    Capture,
    Done,
    Failed,
    Join,
    Layout,
    Link,
    LinkError,
    Loaded,
    Look,
    Refused,
    Replay,
    Step,
)
from models.parallel.ranks import RankLostError, Ranks
from models.rows import Rows, Runs
from tests.models.parallel.leading_process import PATIENCE
from tests.models.parallel.split_hash import load, model
from trouterd.worker.rank import serve


@pytest.fixture
def ends() -> Iterator[tuple[Link, Link]]:
    pair = [Link(sock) for sock in Link.pair()]
    yield pair[0], pair[1]
    for link in pair:
        link.close()


def test_frames_arrive_as_they_were_sent(ends: tuple[Link, Link]) -> None:
    ours, theirs = ends
    layout = Layout(rows=3, logit_rows=2, slots=4, pages=5)
    orders = [
        SplitModel("x", ("cuda:0", "cuda:1"), vocab_size=7).order(1),
        Join(store_fd=3),
        Allocate(pages=9),
        Look("peak"),
        Step(layout=layout, runs=bytes(32 * 1000)),
        Capture(layout=layout),
        Replay(rows=8, logit_rows=8),
    ]
    for order in orders:
        ours.send(order)
    assert [theirs.order() for _ in orders] == orders
    assert (orders[0].rank, orders[0].world, orders[0].device) == (1, 2, "cuda:1")
    answers = [Loaded(weight_bytes=1 << 40, kv_bytes_per_page=2), Bytes(5, 4), Done(), Refused("no"), Failed("end")]
    for answer in answers:
        theirs.send(answer)
    assert [ours.answer() for _ in answers] == answers
    theirs.close()
    assert ours.answer() is None
    with pytest.raises(OSError, match="Broken pipe"):
        ours.send(Done())


def test_frames_that_are_none_of_ours(ends: tuple[Link, Link]) -> None:
    ours, theirs = ends
    with pytest.raises(LinkError, match=f"at most {MAX_FRAME}"):
        ours.send(Failed("x" * MAX_FRAME))
    ours.send(Done())
    with pytest.raises(LinkError, match="undecodable frame"):
        theirs.order()
    raw, other = Link.pair()
    with raw, other:
        raw.sendall(b"\x05\0\0\0Hello\xff\xff\xff\xff")
        link = Link(other)
        with pytest.raises(LinkError, match="undecodable frame of 5 bytes"):
            link.answer()
        with pytest.raises(LinkError, match="a frame of 4294967295 bytes"):
            link.answer()


def test_frames_come_in_pieces(ends: tuple[Link, Link]) -> None:
    ours, theirs = ends
    large = Step(layout=Layout(rows=1, logit_rows=1, slots=1, pages=1), runs=bytes(3_000_000))
    sender = threading.Thread(target=lambda: [ours.send(large) for _ in range(2)])
    sender.start()
    assert [theirs.order(), theirs.order()] == [large, large]
    sender.join()
    raw, other = Link.pair()
    with other:
        with raw:
            raw.sendall(b"\x05\0\0\0Hel")
        assert Link(other).order() is None


def step(slots: list[int], starts: list[int], counts: list[int], max_slots: int) -> tuple[Rows, Runs]:
    """Runs of nonsense; every second one is inactive."""
    firsts = np.cumsum(counts) - counts
    total = sum(counts)
    positions = np.concatenate(
        [np.arange(n) + s if s >= 0 else np.full(n, -1) for s, n in zip(starts, counts, strict=True)]
    )

    def put(values: object) -> torch.Tensor:
        return torch.from_numpy(np.asarray(values).astype(np.int32))

    table = np.random.default_rng(0).permutation(max_slots * 7).reshape(max_slots, 7)
    spread = np.zeros(total)
    spread[firsts] = counts
    rows = Rows(
        tokens=put(np.arange(total) + 100),
        positions=put(positions),
        slots=put(np.repeat(slots, counts)),
        leaders=put(np.repeat(firsts, counts)),
        counts=put(spread),
        page_table=put(table),
        logit_rows=put(firsts + counts - 1),
    )
    return rows, Runs(firsts=firsts, counts=np.array(counts), starts=np.array(starts), slots=np.array(slots))


@pytest.mark.parametrize("max_slots", [4, 7, 30])
def test_packed_rows_mean_the_same(max_slots: int) -> None:
    rows, runs = step([3, 0, 1, 2], [5, -1, 0, 9], [1, 2, 3, 1], max_slots)
    layout = layout_of(rows)
    packed = pack_rows(rows)
    assert (packed.dtype, packed.shape) == (torch.int32, (packed_size(layout),))
    copy = unpack_rows(packed, layout)
    for field in ("tokens", "positions", "leaders", "counts", "logit_rows"):
        assert torch.equal(getattr(copy, field), getattr(rows, field))
    assert len(copy.page_table) == min(len(rows), max_slots)
    assert torch.equal(copy.page_table[copy.slots], rows.page_table[rows.slots])
    copied = unpack_runs(pack_runs(runs, layout))
    assert copied is not None
    for field in ("firsts", "counts", "starts"):
        assert np.array_equal(getattr(copied, field), getattr(runs, field))
    assert torch.equal(copy.slots[torch.from_numpy(copied.firsts)], torch.from_numpy(copied.slots).int())
    assert unpack_runs(pack_runs(None, layout)) is None


class Threads:
    """Ranks served by threads, with a note of who was lost."""

    def __init__(self, world: int) -> None:
        pairs = [Link.pair() for _ in range(world - 1)]
        self.lost: list[tuple[int, str]] = []
        self.told = threading.Event()
        self.theirs = [Link(theirs) for _, theirs in pairs]
        self.ranks = Ranks([Link(ours) for ours, _ in pairs], -1, self._on_loss)
        self._serving: list[threading.Thread] = []

    def _on_loss(self, rank: int, words: str) -> None:
        self.lost.append((rank, words))
        self.told.set()

    def serve(self) -> None:
        def run(link: Link) -> None:
            serve(link, load)
            link.close()

        self._serving = [threading.Thread(target=run, args=(link,), daemon=True) for link in self.theirs]
        for thread in self._serving:
            thread.start()

    def close(self) -> None:
        for link in self.theirs:
            link.hang_up()
        for reader in self.ranks._readers:
            reader.join()
        self.ranks.close()
        for thread in self._serving:
            thread.join()
        for link in self.theirs:
            link.close()


@pytest.fixture
def threads() -> Iterator[Callable[[int], Threads]]:
    made: list[Threads] = []

    def make(world: int) -> Threads:
        made.append(Threads(world))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_answers_come_by_rank_and_what_is_refused_is_one_line(threads: Callable[[int], Threads]) -> None:
    some = threads(3)
    some.serve()
    some.ranks.tell_each(model("hash", 3).order)
    assert [answer.weight_bytes for answer in some.ranks.answers() if isinstance(answer, Loaded)] == [1001, 1002]
    some.ranks.tell_each(model("refuse", 3).order)
    with pytest.raises(ModelError, match="^rank 2 of 3: cpu: not enough memory$"):
        some.ranks.answers()
    some.ranks.tell(Allocate(pages=4))
    assert some.ranks.answers() == [Done(), Done()]
    some.ranks.tell(Allocate(pages=1001))
    with pytest.raises(ModelError, match="^rank 1 of 3: cpu: not enough memory for 1001 pages"):
        some.ranks.answers()
    some.ranks.tell(Look("held"))
    assert some.ranks.answers() == [Bytes()] * 2
    some.ranks.close()
    assert some.lost == []


def test_closing_leaves_no_thread_at_a_link(threads: Callable[[int], Threads]) -> None:
    """A thread that reads on from a closed socket raises, or takes what another file receives."""
    for _ in range(200):
        some = threads(3)
        # Each reader takes these while the links are closed.
        for _ in range(20):
            for link in some.theirs:
                link.send(Done())
        some.ranks.close()
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("rank-")]
        assert some.lost == []


def test_a_rank_that_raises_says_so_and_is_lost(
    threads: Callable[[int], Threads], caplog: pytest.LogCaptureFixture
) -> None:
    some = threads(3)
    some.serve()
    some.ranks.tell_each(model("raise", 3).order)
    with pytest.raises(RankLostError, match="^rank 2 of 3: ValueError: unheard of$"):
        some.ranks.answers()
    with pytest.raises(RankLostError, match="^rank 2 of 3"):
        some.ranks.tell(Look("held"))
    assert some.told.wait(PATIENCE)
    some.ranks.lose(0, "later")
    assert some.lost == [(2, "ValueError: unheard of")]
    assert "ValueError: unheard" in caplog.text


@pytest.mark.parametrize("words", ["", "undecodable frame"])
def test_a_rank_that_hangs_up_is_lost_unasked(threads: Callable[[int], Threads], words: str) -> None:
    some = threads(2)
    if words:
        some.theirs[0].send(Replay(1, 1))
    some.theirs[0].close()
    assert some.told.wait(PATIENCE)
    ((rank, said),) = some.lost
    assert rank == 1
    assert said.startswith(words)
    with pytest.raises(RankLostError, match=f"rank 1 of 2: {words or 'gone'}"):
        some.ranks.tell(Look("held"))


def test_being_out_of_step_is_reported_unless_somebody_is_gone(
    threads: Callable[[int], Threads], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = threads(2)
    alone.ranks.lose(0, "a step broke off")
    assert alone.lost == [(0, "a step broke off")]
    # However long its reader takes to be told.
    monkeypatch.setattr(ranks, "OTHERS_FIRST", PATIENCE)
    other = threads(2)
    other.theirs[0].close()
    other.ranks.lose(0, "a step broke off")
    assert other.told.wait(PATIENCE)
    assert [rank for rank, _ in other.lost] == [1]


def test_closing_does_not_wait_for_whoever_is_told_of_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    told, over = threading.Event(), threading.Event()

    def on_loss(_rank: int, _words: str) -> None:
        told.set()
        assert over.wait(PATIENCE)

    monkeypatch.setattr(ranks, "_FAREWELL", 0.0)
    ours, theirs = (Link(sock) for sock in Link.pair())
    some = Ranks([ours], -1, on_loss)
    theirs.close()
    assert told.wait(PATIENCE)
    assert some.lost
    some.close()
    over.set()
    monkeypatch.setattr(ranks, "_FAREWELL", PATIENCE)
    some.close()
