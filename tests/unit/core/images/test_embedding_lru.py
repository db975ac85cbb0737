"""An encoder's stored embeddings stay within a bound, and none is evicted while it is read."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdmesh.core.images.embedding_lru import EmbeddingLru

A, B, C, D = (bytes([i]) * 16 for i in range(4))


def test_the_least_recently_used_leaves_first() -> None:
    lru = EmbeddingLru(30)
    assert not any(lru.add(name, 10) for name in (A, B, C))
    lru.unpin(lru.pin([A]))
    assert lru.add(D, 10) == [B]
    assert all(name in lru for name in (A, C, D))
    lru.check_invariants()


def test_one_that_is_read_never_leaves() -> None:
    lru = EmbeddingLru(20)
    lru.add(A, 10)
    lru.add(B, 10)
    held = lru.pin([A, B, C])
    assert held == [A, B]
    assert lru.add(C, 10) is None
    assert C not in lru
    lru.unpin(held)
    assert lru.add(C, 20) == [A, B]


def test_what_is_held_without_a_gap_is_found() -> None:
    lru = EmbeddingLru(20)
    lru.add(A, 10)
    lru.add(C, 10)
    assert lru.pin([A, B, C]) == [A]
    assert lru.pin([B, A]) == []


def test_one_larger_than_the_bound_evicts_nothing() -> None:
    lru = EmbeddingLru(20)
    lru.add(A, 10)
    assert lru.add(B, 21) is None
    assert A in lru


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 12), st.booleans()), max_size=60))
def test_the_bound_holds_for_any_use(steps: list[tuple[int, int, bool]]) -> None:
    lru = EmbeddingLru(30)
    held: list[bytes] = []
    for number, size, is_read in steps:
        name = bytes([number]) * 16
        left = lru.add(name, size)
        assert left is None or not set(left) & set(held)
        if is_read:
            held += lru.pin([name])
        elif held:
            lru.unpin([held.pop()])
        lru.check_invariants()
        assert all(each in lru for each in held)
