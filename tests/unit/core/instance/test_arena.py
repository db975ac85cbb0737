"""An arena at its bounds. The property test reserves and frees ranges in any order."""

from __future__ import annotations

import pytest

from pdmesh.core.instance.arena import ArenaAllocator, ArenaRange


def test_a_freed_range_joins_its_neighbours_and_is_reserved_again() -> None:
    arena = ArenaAllocator(3 * 4096)
    ranges = [arena.reserve(4096) for _ in range(3)]
    assert ranges == [ArenaRange(n * 4096, 4096) for n in range(3)]
    for r in ranges[:2]:
        assert r is not None
        arena.free(r)
    assert arena.reserve(2 * 4096 + 1) is None
    assert arena.reserve(2 * 4096) == ArenaRange(0, 2 * 4096)
    arena.check_invariants()


def test_an_empty_arena_grants_nothing() -> None:
    assert ArenaAllocator(0).reserve(1) is None


def test_the_tail_that_is_no_whole_page_is_not_used() -> None:
    arena = ArenaAllocator(3 * 4096 + 17)
    assert arena.size == 3 * 4096
    assert arena.reserve(3 * 4096) is not None
    assert arena.reserve(1) is None


@pytest.mark.parametrize("align", [0, 3, 100])
def test_alignment_is_a_power_of_two(align: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        ArenaAllocator(4096, align)
