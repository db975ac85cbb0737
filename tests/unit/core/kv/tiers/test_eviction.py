"""In which order blocks leave a pool."""

from __future__ import annotations

import pytest

from pdmesh.core.kv.tiers.eviction import PoolBook

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
    """Free slots go first, then blocks that were never asked for again, by age, then the others.

    Pinned and kept blocks never go.
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
    """Each of the others is asked for again, too. If only the least recent use counted, they would
    push it out.
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
