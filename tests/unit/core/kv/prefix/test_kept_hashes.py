"""Block hashes that are kept for later prompts equal freshly computed ones."""

from __future__ import annotations

import random
from array import array
from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from pdmesh.core.kv.prefix.block_hash import block_hashes
from pdmesh.core.kv.prefix.kept_hashes import CHUNK_BLOCKS, KeptHashes

ROOT, OTHER_ROOT = b"r" * 16, b"o" * 16


def tokens_of(seed: int, count: int) -> array[int]:
    return array("I", random.Random(seed).choices(range(1 << 17), k=count))


def hashed(kept: KeptHashes, root: bytes, tokens: array[int], size: int) -> list[bytes]:
    return list(chain.from_iterable(kept.chunks(root, tokens, size)))


@given(
    st.lists(
        st.tuples(
            st.sampled_from([ROOT, OTHER_ROOT]),
            st.integers(0, 1),  # which text
            st.integers(0, 5 * CHUNK_BLOCKS),  # the number of its tokens
            # from this token on, the text is replaced by another one
            st.integers(0, 5 * CHUNK_BLOCKS),
            st.integers(1, 3),
        ),
        min_size=1,
        max_size=6,
    ),
    st.integers(1, 4),
)
def test_what_was_hashed_before_never_changes_a_hash(
    prompts: list[tuple[bytes, int, int, int, int]], max_chunks: int
) -> None:
    kept = KeptHashes(max_chunks)
    for root, seed, count, at, size in prompts:
        tokens = tokens_of(seed, count)
        tokens[at:] = tokens_of(7 + seed, count)[at:]
        assert hashed(kept, root, tokens, size) == block_hashes(root, tokens, size)
        assert len(kept) <= max_chunks


def test_a_chat_that_grows_finds_the_chunks_of_its_earlier_turn() -> None:
    kept, tokens = KeptHashes(), tokens_of(1, 4 * CHUNK_BLOCKS + 9)
    hashed(kept, ROOT, tokens[: 3 * CHUNK_BLOCKS + 5], 1)
    assert (len(kept), kept.num_found) == (3, 0)
    hashed(kept, ROOT, tokens, 1)
    assert (len(kept), kept.num_found) == (4, 3)


def test_prompts_of_another_tenant_find_nothing() -> None:
    kept, tokens = KeptHashes(), tokens_of(1, 2 * CHUNK_BLOCKS)
    hashed(kept, ROOT, tokens, 1)
    hashed(kept, OTHER_ROOT, tokens, 1)
    assert (len(kept), kept.num_found) == (4, 0)


def test_the_chunks_that_were_used_least_recently_leave() -> None:
    kept = KeptHashes(max_chunks=2)
    first, second, third = (tokens_of(seed, CHUNK_BLOCKS) for seed in range(3))
    for tokens in (first, second, first, third, first):
        hashed(kept, ROOT, tokens, 1)
    assert kept.num_found == 2, "the first, each time again"
    hashed(kept, ROOT, second, 1)
    assert kept.num_found == 2, "the second left for the third"
