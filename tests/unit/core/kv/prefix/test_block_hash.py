"""The names of KV blocks are equal exactly where the KV is equal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.core.kv.prefix.block_hash import (
    HASH_BYTES,
    block_hashes,
    tenant_root,
    token_array,
    tokens_from_bytes,
    tokens_to_bytes,
)

ROOT = tenant_root(b"secret", "acme", "", "fp")
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=24)


@given(tokens)
def test_tokens_travel_as_little_endian_words(token_ids: list[int]) -> None:
    data = tokens_to_bytes(token_ids)
    assert data == b"".join(token.to_bytes(4, "little") for token in token_ids)
    assert tokens_to_bytes(token_array(token_ids)) == data
    assert tokens_from_bytes(data).tolist() == token_ids


@pytest.mark.req("S80")
@given(tokens, tokens, st.integers(1, 5))
def test_a_name_stands_for_all_tokens_up_to_its_end(a: list[int], b: list[int], size: int) -> None:
    first, second = block_hashes(ROOT, a, size), block_hashes(ROOT, b, size)
    assert len(first) == len(a) // size, "a block that is not full has no name"
    for end, (one, other) in enumerate(zip(first, second, strict=False), 1):
        assert (one == other) == (a[: end * size] == b[: end * size])


@given(tokens, st.integers(1, 5), st.integers(0, 4))
def test_a_chain_continues_from_its_last_name(a: list[int], size: int, num_before: int) -> None:
    whole = block_hashes(ROOT, a, size)
    num_before = min(num_before, len(whole))
    parent = whole[num_before - 1] if num_before else b""
    assert block_hashes(ROOT, a[num_before * size :], size, parent) == whole[num_before:]


@pytest.mark.req("S80")
def test_tenant_salt_model_and_adapter_each_make_another_chain() -> None:
    parts = [
        ("acme", "", "fp"),
        ("acme", "s", "fp"),
        ("acme", "", "fp2"),
        ("acm", "e", "fp"),
        ("acme", "", "fp", "d1"),
        ("acme", "", "fp", "d2"),
        ("acme", "", "f", "pd2"),
    ]
    roots = {tenant_root(b"secret", *part) for part in parts} | {
        tenant_root(b"other", "acme", "", "fp")
    }
    assert len(roots) == 8
    assert tenant_root(b"secret", "acme", "", "fp", "") in roots, "an empty adapter changes no name"
    assert all(len(root) == HASH_BYTES for root in roots)


images = st.lists(st.tuples(st.integers(0, 23), st.binary(min_size=32, max_size=32)), max_size=3)


@pytest.mark.req("S80", "S128")
@given(images, images, st.integers(1, 5))
def test_a_name_stands_for_the_images_that_begin_before_its_end(
    a: list[tuple[int, bytes]], b: list[tuple[int, bytes]], size: int
) -> None:
    """All images take the same placeholder tokens, so tokens alone do not distinguish images."""
    first, second = sorted(a), sorted(b)
    names = [block_hashes(ROOT, [0] * 24, size, images=each) for each in (first, second)]
    for end, (one, other) in enumerate(zip(*names, strict=True), 1):
        seen = [[i for i in each if i[0] < end * size] for each in (first, second)]
        assert (one == other) == (seen[0] == seen[1])


@pytest.mark.req("S128")
@given(images, st.integers(1, 5), st.integers(0, 4))
def test_a_chain_continues_with_the_images_after_it(
    a: list[tuple[int, bytes]], size: int, num_before: int
) -> None:
    placed = sorted(a)
    whole = block_hashes(ROOT, [0] * 24, size, images=placed)
    begun = num_before * size
    before = block_hashes(ROOT, [0] * begun, size, images=[i for i in placed if i[0] < begun])
    rest = [(at - begun, digest) for at, digest in placed if at >= begun]
    parent = before[-1] if before else b""
    after = block_hashes(ROOT, [0] * (24 - begun), size, parent, rest)
    assert before + after == whole
