"""Which partly filled block a prompt can continue. The machine is in `tests/property/kv`."""

from __future__ import annotations

import pytest

from pdmesh.core.kv.prefix.block_hash import tokens_to_bytes
from pdmesh.core.kv.prefix.partial_block_names import PartialSampling
from pdmesh.core.kv.prefix.partial_blocks import PartialBlocks, PartialFound

ROOT, PARENT, SIZE = b"r" * 16, b"p" * 16, 8


def holding(*blocks: list[int]) -> PartialBlocks:
    """Block n holds the n-th list of tokens; its names are at 4 and 6 tokens."""
    partials = PartialBlocks(PartialSampling(start=4, step=2), SIZE)
    for block, tokens in enumerate(blocks):
        partials.keep(block, ROOT, PARENT, tokens_to_bytes(tokens))
    partials.check_invariants()
    return partials


def find(partials: PartialBlocks, *tokens: int) -> PartialFound | None:
    return partials.find(ROOT, PARENT, tokens_to_bytes(tokens))


@pytest.mark.req("S103")
def test_the_longest_beginning_is_found() -> None:
    partials = holding([1, 2, 3, 4], [1, 2, 3, 4, 5, 6])
    assert find(partials, 1, 2, 3, 4, 5, 6, 7) == PartialFound(1, 6)
    assert find(partials, 1, 2, 3, 4, 9, 9) == PartialFound(1, 4), (
        "of equal blocks, the one kept last"
    )
    assert find(partials, 1, 2, 3, 9) is None
    assert partials.find(b"s" * 16, PARENT, tokens_to_bytes([1, 2, 3, 4])) is None, "another tenant"
    assert partials.find(ROOT, b"q" * 16, tokens_to_bytes([1, 2, 3, 4])) is None


@pytest.mark.req("S104")
def test_only_a_writer_at_the_watermark_may_append() -> None:
    partials = holding([1, 2, 3, 4, 5, 6])
    whole, beginning = find(partials, 1, 2, 3, 4, 5, 6), find(partials, 1, 2, 3, 4)
    assert whole is not None
    assert beginning is not None
    assert partials.may_append(whole)
    assert not partials.may_append(beginning), "another writer's tokens follow"


def test_a_name_is_forgotten_with_the_last_block_that_has_it() -> None:
    partials = PartialBlocks(PartialSampling(start=4, step=2), SIZE)
    data = tokens_to_bytes([1, 2, 3, 4])
    names = partials.keep(0, ROOT, PARENT, data)
    assert len(names) == 1
    assert partials.keep(1, ROOT, PARENT, data) == [], "the name is known already"
    assert partials.forget(1) == names
    partials.check_invariants()
    assert partials.forget(1) == []
