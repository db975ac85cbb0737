"""The arena's allocator under any order of reserving and freeing.

An arena is memory from which ranges are reserved.
"""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from pdmesh.core.instance.arena import ArenaAllocator, ArenaRange

SIZE = 1 << 16


class ArenaMachine(RuleBasedStateMachine):
    """Checks the arena against a model that records the owner of each aligned unit."""

    ranges = Bundle("ranges")

    @initialize(align=st.sampled_from([64, 4096]))
    def start(self, align: int) -> None:
        self.align = align
        self.arena = ArenaAllocator(SIZE, align)
        # None, or the reservation that owns the unit
        self.owner: list[int | None] = [None] * (SIZE // align)

    @rule(target=ranges, length=st.integers(1, SIZE + 1))
    def reserve(self, length: int) -> ArenaRange:
        units = -(-length // self.align)
        r = self.arena.reserve(length)
        if r is None:
            longest = max(
                (len(run) for run in "".join("x" if o else "." for o in self.owner).split("x")),
                default=0,
            )
            assert longest < units, "refused although a free run is long enough"
            return multiple()  # type: ignore[return-value]  # hypothesis: adds nothing to the bundle
        first = r.offset // self.align
        assert r.offset % self.align == 0
        assert r.length == length
        assert all(o is None for o in self.owner[first : first + units]), "handed out twice"
        self.owner[first : first + units] = [r.offset + 1] * units
        return r

    @rule(r=consumes(ranges))
    def free(self, r: ArenaRange) -> None:
        self.arena.free(r)
        self.owner = [None if o == r.offset + 1 else o for o in self.owner]
        with pytest.raises(ValueError, match="not reserved"):
            self.arena.free(r)

    @invariant()
    def tiles(self) -> None:
        self.arena.check_invariants()
        used = sum(o is not None for o in self.owner) * self.align
        assert self.arena.bytes_used == used

    def teardown(self) -> None:
        pass


TestArena = ArenaMachine.TestCase
