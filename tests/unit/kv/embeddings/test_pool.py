"""The image embeddings that an encoder lends stay in place until they are given back."""

from __future__ import annotations

import numpy as np

from pdmesh.kv.embeddings.names import embedding_name, identifier_of
from pdmesh.kv.embeddings.pool import EmbeddingPool
from pdmesh.kv.transport.base import ByteArray

A, B, C = (bytes([i]) * 16 for i in range(3))


def data(size: int, fill: int = 1) -> ByteArray:
    return np.full(size, fill, np.uint8)


def test_embeddings_are_lent_by_name_and_in_order() -> None:
    pool = EmbeddingPool(100)
    pool.add(A, data(10, 1))
    pool.add(B, data(10, 2))
    lent = pool.open([B, A, C])
    assert lent is not None
    assert [view[0] for view in lent.views] == [2, 1]
    pool.close(lent)
    assert pool.open([C, A]) is None
    pool.check_invariants()


def test_what_is_lent_is_not_evicted() -> None:
    pool = EmbeddingPool(20)
    pool.add(A, data(10))
    pool.add(B, data(10))
    lent = pool.open([A])
    assert lent is not None
    assert pool.add(C, data(10)) == [B]
    assert pool.add(B, data(20)) is None
    pool.close(lent)
    assert set(pool.add(B, data(20)) or ()) == {A, C}
    pool.check_invariants()


def test_views_of_one_fetch_have_one_size() -> None:
    pool = EmbeddingPool(100)
    pool.add(A, data(10))
    pool.add(B, data(20))
    lent = pool.open([A, B])
    assert lent is not None
    assert len(lent.views) == 1
    pool.close(lent)
    assert set(pool.add(C, data(90)) or ()) == {A, B}
    pool.check_invariants()


def test_a_name_stands_for_one_image_of_one_owner() -> None:
    names = {
        embedding_name(identifier_of(salt, digest))
        for salt in ("", "one", "two")
        for digest in (bytes(32), bytes(31) + b"1")
    }
    assert len(names) == 6
    assert {len(name) for name in names} == {16}
