"""Full and partial blocks under any order of requests: nobody's tokens are ever overwritten by somebody else."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pdmesh.core.blocks import BlockTable, Claim, Copy

NUM_BLOCKS, SIZE = 6, 4
picks = st.integers(0, 40)


@dataclass
class Request:
    """What one request wrote or took over, and where it lies."""

    number: int
    partial: int | None = None
    tokens: list[int] = field(default_factory=list)  # in its partial block
    full: dict[int, list[int]] = field(default_factory=dict)


class BlockTableMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.table = BlockTable(NUM_BLOCKS, SIZE)
        self.memory: list[list[int]] = [[0] * SIZE for _ in range(NUM_BLOCKS)]
        self.requests: list[Request] = []
        self.copies: list[tuple[Request, Claim, Copy, list[int]]] = []
        self.next = 1

    def _number(self) -> int:
        self.next += 1
        return self.next

    def _one(self, which: int) -> Request | None:
        return self.requests[which % len(self.requests)] if self.requests else None

    @rule()
    def a_request_comes(self) -> None:
        request = Request(self._number())
        request.partial = self.table.open(request.number)
        if request.partial is None:
            assert self.table.num_available == 0
            return
        self.requests.append(request)

    @rule(which=picks, count=st.integers(1, SIZE))
    def a_request_appends(self, which: int, count: int) -> None:
        request = self._one(which)
        if request is None or request.partial is None:
            return
        if any(r is request for r, *_ in self.copies):
            return  # its copy is not in place
        block, mark = request.partial, len(request.tokens)
        assert self.table.watermark(block) == mark
        count = min(count, SIZE - mark)
        for at in range(mark, mark + count):
            token = self._number()
            self.memory[block][at] = token
            request.tokens.append(token)
        if self.table.append(block, request.number, count):
            request.full[block] = request.tokens
            request.partial, request.tokens = self.table.open(request.number), []

    @rule(which=picks, block=st.integers(0, NUM_BLOCKS - 1))
    def a_full_block_is_shared(self, which: int, block: int) -> None:
        request = self._one(which)
        if request is None or not self.table.is_full(block) or block in request.full:
            return
        self.table.share(block)
        request.full[block] = list(self.memory[block])

    @rule(block=st.integers(0, NUM_BLOCKS - 1), count=st.integers(1, SIZE))
    def a_request_continues_a_partial_block(self, block: int, count: int) -> None:
        mark = self.table.watermark(block)
        is_written = block not in self.table._free and 0 < mark < SIZE
        if not is_written:
            return
        num_tokens = min(count, mark)
        request = Request(self._number())
        expected = self.memory[block][:num_tokens]
        writers = {r.partial for r in self.requests}
        claim = self.table.claim(block, request.number, num_tokens)
        if claim is None:
            return
        request.partial, request.tokens = claim.block, list(expected)
        if claim.copy is None:
            assert block not in writers, "never two that append to one block"
            assert num_tokens == mark
        else:
            assert claim.block != block
            self.copies.append((request, claim, claim.copy, expected))
        self.requests.append(request)

    @rule(which=picks)
    def a_copy_ends(self, which: int) -> None:
        if not self.copies:
            return
        request, _, copy, expected = self.copies.pop(which % len(self.copies))
        source = self.memory[copy.source][: copy.num_tokens]
        assert source == expected, "the source held still for as long as the copy took"
        self.memory[copy.target][: copy.num_tokens] = source
        self.table.filled(copy, request.number)
        self.table.copied(copy)

    @rule(which=picks)
    def a_request_leaves(self, which: int) -> None:
        request = self._one(which)
        if request is None:
            return
        for index, (other, _, copy, _) in enumerate(self.copies):
            if other is request:
                self.table.copied(copy)
                del self.copies[index]
                break
        if request.partial is not None:
            self.table.leave(request.partial, request.number)
        for block in request.full:
            self.table.release(block)
        self.requests.remove(request)

    @invariant()
    def everyone_finds_what_it_wrote(self) -> None:
        self.table.check_invariants()
        copying = [id(request) for request, *_ in self.copies]
        for request in self.requests:
            for block, tokens in request.full.items():
                assert self.memory[block] == tokens
            if request.partial is not None and id(request) not in copying:
                assert self.memory[request.partial][: len(request.tokens)] == request.tokens
        owned = [r.partial for r in self.requests if r.partial is not None]
        assert len(owned) == len(set(owned))

    def teardown(self) -> None:
        while self.copies:
            self.a_copy_ends(0)
        while self.requests:
            self.a_request_leaves(0)
        assert self.table.num_available == NUM_BLOCKS
        self.table.check_invariants()


TestBlockTable = pytest.mark.req("S104")(BlockTableMachine.TestCase)
TestBlockTable.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)


@pytest.mark.req("S104")
def test_of_two_that_continue_one_partial_block_the_second_gets_a_copy() -> None:
    table = BlockTable(4, SIZE)
    block = table.open(1)
    assert block is not None
    assert not table.append(block, 1, 2)
    table.leave(block, 1)
    first, second = table.claim(block, 2, 2), table.claim(block, 3, 2)
    assert first == Claim(block, 2)
    assert second is not None
    assert second.copy == Copy(block, second.block, 2)
    with pytest.raises(AssertionError, match="only the owner"):
        table.append(block, 3, 1)
    assert table.append(block, 2, 2), "partial to full"
    table.share(block)


@pytest.mark.req("S104")
def test_one_that_turns_off_before_the_watermark_copies_what_it_shares() -> None:
    table = BlockTable(4, SIZE)
    block = table.open(1)
    assert block is not None
    table.append(block, 1, 3)
    table.leave(block, 1)
    claim = table.claim(block, 2, 1)
    assert claim is not None
    assert claim.copy == Copy(block, claim.block, 1)
    assert table.watermark(block) == 3, "the others' conversation is still there"


@pytest.mark.req("S104")
def test_a_block_whose_content_was_given_up_has_another_version() -> None:
    table = BlockTable(1, SIZE)
    block = table.open(1)
    assert block is not None
    table.append(block, 1, 3)
    before = table.version(block)
    table.leave(block, 1)
    assert table.version(block) == before, "kept"
    assert table.open(2) == block
    assert table.version(block) != before
