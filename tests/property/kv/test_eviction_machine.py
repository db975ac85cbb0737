"""The host pool's bookkeeping against a model, for any order of calls."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pdmesh.core.kv.tiers.pool_eviction import PoolBook

NUM_SLOTS = 8
names = st.integers(0, 15).map(lambda n: bytes([n]) * 16)
owners = st.sampled_from([b"a", b"b"])
sessions = st.sampled_from(["s", "t"])
chains = st.lists(names, max_size=5)


class PoolBookMachine(RuleBasedStateMachine):
    """`memory` has the bytes that a shell would have written. A pinned block must always be found
    there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.book = PoolBook(
            NUM_SLOTS,
            owner_share=0.75,
            protected_share=0.5,
            keep_after=3,
            held_share=0.5,
            owner_held_share=0.75,
        )
        self.now = 0
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
        assert name not in self.book, "a block is found only after it is written"

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
            assert self.memory[self.book.slot(name)] == name, (
                "the bytes of a pinned block do not change"
            )
            self.book.unpin(name, is_use)

    @rule(name=names)
    def a_block_is_found_bad(self, name: bytes) -> None:
        self.book.forget(name)
        assert name not in self.book

    @rule(prefix=st.lists(names, max_size=5))
    def prefixes_are_fixed(self, prefix: list[bytes]) -> None:
        self.book.fix(prefix)

    @rule(session=sessions, owner=owners, chain=chains, lasts=st.integers(1, 5))
    def a_session_pauses(self, session: str, owner: bytes, chain: list[bytes], lasts: int) -> None:
        self.book.hold(session, owner, chain, self.now + lasts)

    @rule(session=sessions)
    def a_session_goes_on(self, session: str) -> None:
        self.book.resume(session)

    @rule(session=sessions, chain=chains)
    def a_session_is_done(self, session: str, chain: list[bytes]) -> None:
        self.book.retire(session, chain)

    @rule()
    def time_passes(self) -> None:
        self.now += 1
        self.book.end_holds(self.now)

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
