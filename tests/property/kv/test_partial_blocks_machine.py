"""Full and partial blocks under any order of requests: no request overwrites another's tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pdmesh.core.kv.prefix.block_hash import block_hashes, tokens_to_bytes
from pdmesh.core.kv.prefix.partial_block_names import PartialSampling
from pdmesh.engine.sim.block_pool import BlockPool

NUM_BLOCKS, SIZE = 10, 8
ROOT = b"r" * 16
# Few different tokens, so that conversations share prefixes.
words = st.lists(st.integers(1, 2), max_size=9)


@dataclass
class Conversation:
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    num_reused: int = 0
    is_computed: bool = False


class TailMachine(RuleBasedStateMachine):
    """Prompts come, claim the blocks that are held for them, later write the rest into `memory`,
    keep it, and leave.
    """

    sampling = PartialSampling(start=4, step=2)

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, SIZE, self.sampling)
        self.memory = [[0] * SIZE for _ in range(NUM_BLOCKS)]
        self.running: list[Conversation] = []
        self.known: list[list[int]] = [[1]]
        self.mirror: set[bytes] = set()

    @rule(which=st.integers(0, 30), cut=st.sampled_from([0, 0, 0, 1, 2, 5, 11]), more=words)
    def a_prompt_comes(self, which: int, cut: int, more: list[int]) -> None:
        """A prompt comes that continues an earlier one, or shares its beginning."""
        earlier = self.known[which % len(self.known)]
        tokens = [*earlier[: len(earlier) - cut % (len(earlier) + 1)], *more][: 3 * SIZE] or [1]
        hashes = block_hashes(ROOT, tokens, SIZE)
        blocks = self.pool.match(hashes[: (len(tokens) - 1) // SIZE])
        num_reused = len(blocks) * SIZE
        data = tokens_to_bytes(tokens[num_reused : min(num_reused + SIZE, len(tokens) - 1)])
        parent = hashes[len(blocks) - 1] if blocks else b""
        tail = self.pool.claim_partial(ROOT, parent, data)
        if tail is not None:
            if tail.source is not None:
                self.memory[tail.block][: tail.num_tokens] = self.memory[tail.source][
                    : tail.num_tokens
                ]
            assert all(tail.block not in other.blocks for other in self.running), "exclusive"
            blocks.append(tail.block)
            num_reused += tail.num_tokens
        wanted = -(-len(tokens) // SIZE) - len(blocks)
        if wanted > self.pool.num_free:
            self.pool.release(blocks)
            return
        blocks += self.pool.allocate(wanted)
        self.running.append(Conversation(tokens, blocks, num_reused))

    @rule(which=st.integers(0, 20))
    def a_prompt_is_computed(self, which: int) -> None:
        waiting = [c for c in self.running if not c.is_computed]
        if not waiting:
            return
        one = waiting[which % len(waiting)]
        one.is_computed = True
        for at in range(one.num_reused, len(one.tokens)):
            self.memory[one.blocks[at // SIZE]][at % SIZE] = one.tokens[at]
        hashes = block_hashes(ROOT, one.tokens, SIZE)
        for block, name in zip(one.blocks, hashes, strict=False):
            self.pool.store(block, name)
        # As in the sim engine: full blocks that can only have their own names are not looked up.
        first = 0 if self.sampling.start < SIZE else len(one.tokens) // SIZE
        for index, block in enumerate(one.blocks[first:], first):
            data = tokens_to_bytes(one.tokens[index * SIZE : (index + 1) * SIZE])
            self.pool.keep_partial(block, ROOT, hashes[index - 1] if index else b"", data)
        self.known.append(one.tokens)

    @rule(which=st.integers(0, 20))
    def a_prompt_leaves(self, which: int) -> None:
        """A prompt leaves, computed or given up."""
        if self.running:
            self.pool.release(self.running.pop(which % len(self.running)).blocks)

    @rule()
    def events_are_published(self) -> None:
        stored, removed = self.pool.take_changes()
        assert not set(stored) & set(removed)
        assert set(removed) <= self.mirror
        assert not set(stored) & self.mirror
        self.mirror = (self.mirror - set(removed)) | set(stored)

    @invariant()
    def everyone_finds_what_is_his(self) -> None:
        self.pool.check_invariants()
        for one in self.running:
            there = len(one.tokens) if one.is_computed else one.num_reused
            for at in range(there):
                assert self.memory[one.blocks[at // SIZE]][at % SIZE] == one.tokens[at]

    def teardown(self) -> None:
        while self.running:
            self.a_prompt_leaves(0)
        assert self.pool.num_free == NUM_BLOCKS
        self.events_are_published()


class WholeTailMachine(TailMachine):
    """Blocks shorter than `start` have one name each, at their full number of tokens."""

    sampling = PartialSampling(start=208, step=4)


TestTails = pytest.mark.req("S103", "S104")(TailMachine.TestCase)
TestWholeTails = pytest.mark.req("S103", "S104")(WholeTailMachine.TestCase)
for _case in (TestTails, TestWholeTails):
    _case.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
del _case  # otherwise pytest would run it twice


def pool_with(
    tokens: list[int], sampling: PartialSampling = TailMachine.sampling
) -> tuple[BlockPool, int]:
    """A pool that keeps one block with these tokens, which no request uses."""
    pool = BlockPool(4, SIZE, sampling)
    [block] = pool.allocate(1)
    pool.keep_partial(block, ROOT, b"", tokens_to_bytes(tokens))
    pool.release([block])
    return pool, block


@pytest.mark.req("S104")
def test_if_two_requests_continue_one_partial_block_the_second_gets_a_copy() -> None:
    pool, block = pool_with([1, 2, 3, 4])
    data = tokens_to_bytes([1, 2, 3, 4, 5])
    first, second = pool.claim_partial(ROOT, b"", data), pool.claim_partial(ROOT, b"", data)
    assert first is not None
    assert second is not None
    assert (first.block, first.num_tokens, first.source) == (block, 4, None)
    assert second.block != block
    assert (second.num_tokens, second.source) == (4, block)


@pytest.mark.req("S103", "S104")
def test_the_longest_match_at_a_sampled_position_is_copied_if_the_rest_differs() -> None:
    pool, block = pool_with([1, 2, 3, 4, 5, 6, 7])  # named at 4 and 6
    tail = pool.claim_partial(ROOT, b"", tokens_to_bytes([1, 2, 3, 4, 5, 6, 9]))
    assert tail is not None
    assert (tail.num_tokens, tail.source) == (6, block)
    tail = pool.claim_partial(ROOT, b"", tokens_to_bytes([1, 2, 3, 4, 9, 9, 9]))
    assert tail is not None
    assert tail.num_tokens == 4
    assert pool.claim_partial(ROOT, b"", tokens_to_bytes([1, 2, 3, 9])) is None
    assert pool.claim_partial(b"s" * 16, b"", tokens_to_bytes([1, 2, 3, 4])) is None, (
        "another tenant"
    )
    assert pool.claim_partial(ROOT, b"p" * 16, tokens_to_bytes([1, 2, 3, 4])) is None


@pytest.mark.req("S104")
def test_a_partial_block_that_fills_up_is_shared_and_loses_its_old_names() -> None:
    pool, block = pool_with([1, 2, 3, 4], PartialSampling(start=208, step=4))
    stored, _ = pool.take_changes()
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    tail = pool.claim_partial(ROOT, b"", tokens_to_bytes(tokens[:6]))
    assert tail is not None
    [name] = block_hashes(ROOT, tokens, SIZE)
    pool.store(block, name)
    pool.keep_partial(block, ROOT, b"", tokens_to_bytes(tokens))
    assert pool.take_changes() == ((name,), stored)
    pool.release([block])
    assert pool.match([name]) == pool.match([name]) == [block]
    assert pool.claim_partial(ROOT, b"", tokens_to_bytes(tokens[:6])) is None
    pool.check_invariants()


@pytest.mark.req("S104")
def test_no_request_appends_to_a_block_that_became_full() -> None:
    pool, block = pool_with([1, 2, 3, 4], PartialSampling(start=208, step=4))
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    assert pool.claim_partial(ROOT, b"", tokens_to_bytes(tokens[:6])) is not None
    pool.store(block, block_hashes(ROOT, tokens, SIZE)[0])
    pool.release([block])
    assert pool.claim_partial(ROOT, b"", tokens_to_bytes([1, 2, 3, 4, 9])) is None
    pool.check_invariants()


@pytest.mark.req("S104")
def test_a_request_that_gives_up_leaves_the_partial_block_unchanged() -> None:
    pool, block = pool_with([1, 2, 3, 4])
    data = tokens_to_bytes([1, 2, 3, 4, 5])
    assert pool.claim_partial(ROOT, b"", data) is not None
    pool.release([block])
    again = pool.claim_partial(ROOT, b"", data)
    assert again is not None
    assert (again.block, again.source) == (block, None)
