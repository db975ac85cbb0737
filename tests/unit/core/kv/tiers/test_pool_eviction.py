"""The order in which blocks are evicted from a host pool."""

from __future__ import annotations

import pytest

from pdmesh.core.kv.tiers.pool_eviction import PoolBook

NUM_SLOTS = 8


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
    """Free slots are filled first. Then blocks leave that were not used after they were stored,
    oldest first, and then the others.

    Here, pinned and kept blocks do not leave.
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
    """Each of the other prompts is used again once. With plain LRU, they would push the system
    prompt out.
    """
    book = PoolBook(16, keep_after=4)
    system = stored(book, 1, 2)
    for name in system * 4:
        used(book, name)
    for key in range(10, 200):
        (name,) = stored(book, key)
        used(book, name)
    assert set(system) <= set(book.names())


@pytest.mark.req("S96")
def test_kept_blocks_that_are_no_longer_asked_for_make_room_for_others() -> None:
    book = PoolBook(8, keep_after=2)
    names = stored(book, 1, 2, 3)
    for name in names:
        used(book, name)
        used(book, name)
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
def test_a_fixed_prefix_stays_even_if_it_is_never_asked_for() -> None:
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
def test_fixed_blocks_leave_half_of_the_pool_to_the_others() -> None:
    book = PoolBook(8)
    book.fix([bytes([n]) * 16 for n in range(1, 9)])
    stored(book, *range(1, 9))
    assert book.num_fixed == 4
    stored(book, *range(10, 30))
    assert [name for name in book.names() if name[0] < 10] == [
        bytes([n]) * 16 for n in (1, 2, 3, 4)
    ]


@pytest.mark.req("S96", "S108")
def test_the_blocks_of_a_paused_session_go_last_until_its_time_is_over() -> None:
    book = PoolBook(8, held_share=0.5, owner_held_share=1.0)
    session = stored(book, 1, 2)
    book.hold("s", b"a", [*session, bytes([3]) * 16], until=10.0)
    session += stored(book, 3)  # the block that was stored after the hold began
    for key in range(10, 40):
        (name,) = stored(book, key)
        used(book, name)
    book.end_holds(now=9.0)
    assert set(session) <= set(book.names())
    book.end_holds(now=10.0)
    assert book.num_held == 0
    stored(book, *range(40, 48))
    assert not set(session) & set(book.names())


@pytest.mark.req("S96")
def test_sessions_hold_no_more_than_a_share_of_the_pool_and_of_a_tenants_quota() -> None:
    book = PoolBook(16, owner_share=0.5, held_share=0.5, owner_held_share=0.5)
    chain = stored(book, *range(1, 9), owner=b"a")
    book.hold("s", b"a", chain, until=10.0)
    book.hold("t", b"a", chain, until=10.0)
    assert book.num_held == 4
    other = stored(book, *range(21, 29), owner=b"b")
    book.hold("u", b"b", other, until=10.0)
    assert book.num_held == 8
    stored(book, *range(40, 60), owner=b"c")
    assert set(book.names()) >= {*chain[:4], *other[:4]}, "the heads of the prompts"


@pytest.mark.req("S96")
def test_one_owner_holds_at_most_a_quarter_of_what_sessions_may_hold() -> None:
    book = PoolBook(64)
    owners = [bytes([o]) for o in range(4)]
    chains = [stored(book, *range(10 * o, 10 * o + 10), owner=owners[o]) for o in range(4)]
    book.hold("greedy", owners[0], [bytes([n]) * 16 for n in range(100, 200)], until=10.0)
    for session in ("s", "t"):
        for owner, chain in zip(owners, chains, strict=True):
            book.hold(session + owner.hex(), owner, chain, until=10.0)
    assert book.num_held == 16
    book.check_invariants()
    stored(book, *range(100, 164), owner=b"x")
    kept = {name for chain in chains for name in chain} & set(book.names())
    assert kept == {name for chain in chains for name in chain[:4]}


def test_held_blocks_are_evicted_if_there_is_nothing_else() -> None:
    book = PoolBook(4, held_share=1.0, owner_held_share=1.0)
    book.hold("s", b"a", stored(book, 1, 2, 3, 4), until=10.0)
    (new,) = stored(book, 5, owner=b"b")
    assert new in book
    assert book.num_held == 3


@pytest.mark.req("S96", "S108")
def test_the_blocks_of_a_session_that_is_done_go_first_and_its_tail_before_its_head() -> None:
    book = PoolBook(6, protected_share=1.0)
    session = stored(book, 1, 2, 3)
    for name in session:
        used(book, name)
    others = stored(book, 11, 12, 13)
    book.retire("s", session)
    stored(book, 21, 22)
    assert session[0] in book
    assert not {*session[1:]} & set(book.names())
    assert set(others) <= set(book.names())


def test_what_another_session_holds_is_not_retired() -> None:
    book = PoolBook(4, held_share=0.5)
    shared, own, free = stored(book, 1, 2, 3)
    book.hold("other", b"a", [shared], until=10.0)
    book.retire("s", [shared, own])
    stored(book, 4, 5)
    assert (shared in book, own in book, free in book) == (True, False, True)


def test_a_session_that_resumes_holds_nothing_more() -> None:
    book = PoolBook(4, held_share=0.5)
    session = stored(book, 1, 2)
    book.hold("s", b"a", session, until=10.0)
    book.resume("s")
    assert book.num_held == 0
    stored(book, *range(10, 14))
    assert not set(session) & set(book.names())
