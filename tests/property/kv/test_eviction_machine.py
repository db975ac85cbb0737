"""A pool of blocks under any order of events: what is in use stays, and the least recently used
goes first.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pdmesh.core.kv.tiers.eviction import PoolBook

NUM_SLOTS = 8
names = st.integers(0, 15).map(lambda n: bytes([n]) * 16)
owners = st.sampled_from([b"a", b"b"])


class PoolBookMachine(RuleBasedStateMachine):
    """`memory` has what a shell would write; a pinned block must be found there, whatever else
    happens.
    """

    def __init__(self) -> None:
        super().__init__()
        self.book = PoolBook(NUM_SLOTS, owner_share=0.75, protected_share=0.5, keep_after=3)
        self.memory: dict[int, bytes] = {}
        self.pins: list[bytes] = []
        self.writing: dict[bytes, int] = {}
        self.mirror: set[bytes] = set()

    @rule(name=names, owner=owners)
    def a_block_is_reserved(self, name: bytes, owner: bytes) -> None:
        fixed = {n for n in self.book.names() if self.book.is_fixed(n)}
        slot = self.book.reserve(name, owner)
        assert fixed <= set(self.book.names()), "whatever comes"
        if slot is None:
            return
        assert slot not in self.writing.values()
        assert slot not in [self.book.slot(n) for n in self.book.names()]
        self.writing[name] = slot
        self.memory.pop(slot, None)
        assert name not in self.book, "found only when it is written"

    @rule()
    def what_is_kept_is_told(self) -> None:
        assert set(self.book.take_kept()) <= set(self.book.names())
        assert self.book.take_kept() == ()

    @rule(name=names, is_good=st.booleans())
    def a_write_ends(self, name: bytes, is_good: bool) -> None:
        if (slot := self.writing.pop(name, None)) is None:
            return
        if is_good:
            self.memory[slot] = name
            self.book.commit(name)
        else:
            self.book.abandon(name)

    @rule(name=names)
    def a_block_is_pinned(self, name: bytes) -> None:
        is_here = name in self.book
        slot = self.book.pin(name)
        assert (slot is not None) == is_here
        if slot is not None:
            assert self.memory[slot] == name
            self.pins.append(name)

    @rule(which=st.integers(0, 30), is_use=st.booleans())
    def a_pin_is_given_back(self, which: int, is_use: bool) -> None:
        if self.pins:
            name = self.pins.pop(which % len(self.pins))
            assert self.memory[self.book.slot(name)] == name, "its bytes stayed while it was pinned"
            self.book.unpin(name, is_use)

    @rule(name=names)
    def a_block_is_found_bad(self, name: bytes) -> None:
        self.book.forget(name)
        assert name not in self.book

    @rule(prefix=st.lists(names, max_size=5))
    def prefixes_are_fixed(self, prefix: list[bytes]) -> None:
        self.book.fix(prefix)

    @rule(chain=st.lists(names, max_size=5))
    def a_chain_is_touched(self, chain: list[bytes]) -> None:
        self.book.touch(chain)

    @rule()
    def changes_are_published(self) -> None:
        stored, removed = self.book.take_changes()
        assert not set(stored) & set(removed)
        assert set(removed) <= self.mirror
        self.mirror = (self.mirror - set(removed)) | set(stored)
        assert self.mirror == set(self.book.names())

    @invariant()
    def keeps_its_own_invariants(self) -> None:
        self.book.check_invariants()

    def teardown(self) -> None:
        for name in self.pins:
            self.book.unpin(name)
        for name in self.writing:
            self.book.abandon(name)
        for name in self.book.names():
            self.book.forget(name)
        self.book.check_invariants()
        assert len(self.book) == 0
        assert self.book.num_pinned == 0


TestPoolBook = PoolBookMachine.TestCase
TestPoolBook.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
TestPoolBook = pytest.mark.req("S78", "S96")(TestPoolBook)


def stored(book: PoolBook, *keys: int, owner: bytes = b"a") -> list[bytes]:
    made = [bytes([key]) * 16 for key in keys]
    for name in made:
        assert book.reserve(name, owner) is not None
        book.commit(name)
    return made


def used(book: PoolBook, name: bytes) -> None:
    assert book.pin(name) is not None
    book.unpin(name)


@pytest.mark.req("S78", "S96")
def test_the_order_of_eviction() -> None:
    """Free slots, then what was never asked for again by age, then what was; never what is pinned
    or kept.
    """
    book = PoolBook(6, keep_after=3)
    a, b, c, d, e, f = stored(book, *range(6))
    used(book, a)
    used(book, b)
    for _ in range(3):
        used(book, c)
    assert book.take_kept() == (c,)
    assert book.pin(d) is not None
    gone: list[bytes] = []
    for key in range(10, 14):
        before = set(book.names())
        assert book.reserve(bytes([key]) * 16, b"a") is not None
        gone += sorted(before - set(book.names()))
    assert gone == [e, f, a, b]
    assert book.reserve(b"z" * 16, b"a") is None, (
        "all that is left is pinned, kept or being written"
    )
    assert {c, d} <= set(book.names())


@pytest.mark.req("S96")
def test_a_system_prompt_stays_however_many_other_prompts_come() -> None:
    """Each of the others is asked for again, too, which least recently used alone would let push it
    out.
    """
    book = PoolBook(16, keep_after=4)
    system = stored(book, 1, 2)
    for name in system * 4:
        used(book, name)
    for key in range(10, 200):
        (name,) = stored(book, key)
        used(book, name)
    assert set(system) <= set(book.names())
    assert book.num_kept == 2


@pytest.mark.req("S96")
def test_the_kept_ones_nobody_asks_for_any_more_make_room_for_those_that_are() -> None:
    book = PoolBook(8, keep_after=2)
    names = stored(book, 1, 2, 3)
    for name in names:
        used(book, name)
        used(book, name)
    assert book.num_kept == 2
    for key in range(10, 30):
        stored(book, key)
    assert set(names[1:]) <= set(book.names())
    assert names[0] not in book


@pytest.mark.req("S78")
def test_the_tail_of_a_prompt_goes_before_its_head() -> None:
    book = PoolBook(3)
    chain = stored(book, 1, 2, 3)
    book.touch(chain)
    for key in (10, 11):
        assert book.reserve(bytes([key]) * 16, b"a") is not None
    assert book.names() == chain[:1]


@pytest.mark.req("S96")
def test_an_owner_at_its_quota_makes_room_among_its_own_blocks() -> None:
    book = PoolBook(4, owner_share=0.5)
    (other,) = stored(book, 9, owner=b"b")
    first, second, third = stored(book, 1, 2, 3, owner=b"a")
    assert set(book.names()) == {other, second, third}, "there was a free slot, and it stays free"
    assert first not in book


@pytest.mark.req("S96")
def test_blocks_asked_for_again_do_not_keep_new_ones_out() -> None:
    book = PoolBook(4, protected_share=0.5)
    names = stored(book, 1, 2, 3, 4)
    for name in names:
        used(book, name)
    (fifth,) = stored(book, 5)
    assert fifth in book
    assert names[0] not in book


@pytest.mark.req("S78", "S96")
def test_a_prefix_that_is_fixed_stays_though_nobody_asks_for_it() -> None:
    book = PoolBook(8, keep_after=2)
    book.fix([bytes([n]) * 16 for n in (1, 2, 3)])
    here = stored(book, 1, 2)
    for key in range(10, 60):
        (name,) = stored(book, key)
        used(book, name)
        used(book, name)
    late = stored(book, 3)
    stored(book, *range(60, 80))
    assert book.num_fixed == 3
    assert set(here + late) <= set(book.names())
    book.fix([])
    stored(book, *range(80, 100))
    assert not set(here + late) & set(book.names())


@pytest.mark.req("S78", "S96")
def test_what_is_fixed_leaves_half_of_the_pool_to_the_others() -> None:
    book = PoolBook(8)
    book.fix([bytes([n]) * 16 for n in range(1, 9)])
    stored(book, *range(1, 9))
    assert book.num_fixed == 4
    stored(book, *range(10, 30))
    assert [name for name in book.names() if name[0] < 10] == [
        bytes([n]) * 16 for n in (1, 2, 3, 4)
    ]
