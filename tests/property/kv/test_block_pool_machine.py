import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pdmesh.engine.sim.block_pool import BlockPool

NUM_BLOCKS = 12


def chain(family: int, length: int) -> list[bytes]:
    """The block hashes of a prompt. Prompts of one family share their prefix."""
    return [bytes([family, n]) * 8 for n in range(length)]


class BlockPoolMachine(RuleBasedStateMachine):
    """Prompts find their cached prefix, store their blocks and leave.

    A mirror of the pool is updated by the pool's events only.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.held: list[list[int]] = []
        self.content: dict[int, bytes] = {}
        self.mirror: set[bytes] = set()

    @rule(family=st.integers(0, 3), length=st.integers(1, 5), anonymous=st.integers(0, 2))
    def prompt_comes(self, family: int, length: int, anonymous: int) -> None:
        hashes = chain(family, length)
        blocks = self.pool.match(hashes)
        assert [self.content[b] for b in blocks] == hashes[: len(blocks)]
        wanted = length - len(blocks) + anonymous
        if wanted > self.pool.num_free:
            self.pool.release(blocks)
            return
        fresh = self.pool.allocate(wanted)
        in_use = {b for other in self.held for b in other} | set(blocks)
        assert not in_use & set(fresh)
        blocks += fresh
        for block, block_hash in zip(blocks, hashes, strict=False):
            self.content[block] = block_hash
            self.pool.store(block, block_hash)
        self.held.append(blocks)

    @rule(which=st.integers(0, 20))
    def prompt_leaves(self, which: int) -> None:
        if self.held:
            self.pool.release(self.held.pop(which % len(self.held)))

    @rule()
    def events_are_published(self) -> None:
        stored, removed = self.pool.take_changes()
        assert not set(stored) & set(removed)
        assert set(removed) <= self.mirror
        assert not set(stored) & self.mirror
        self.mirror = (self.mirror - set(removed)) | set(stored)

    @invariant()
    def keeps_its_own_invariants(self) -> None:
        self.pool.check_invariants()

    def teardown(self) -> None:
        self.events_are_published()
        for blocks in self.held:
            self.pool.release(blocks)
        assert self.pool.num_free == NUM_BLOCKS
        found = {h for f in range(4) for h in chain(f, 5) if self.pool.match([h])}
        assert found == self.mirror


TestBlockPool = pytest.mark.req("S104")(BlockPoolMachine.TestCase)
TestBlockPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
