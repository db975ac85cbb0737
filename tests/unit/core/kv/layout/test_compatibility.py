"""Engines with equal fingerprints may exchange KV; a refusal says in what both sides differ."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from pdmesh.core.kv.layout import compatibility as kv_format
from pdmesh.core.kv.layout.compatibility import (
    UNSCALED,
    KvFormat,
    difference,
    parse,
)

BF16 = KvFormat("ab12", "bfloat16", UNSCALED, 64, "77fe", num_ranks=2)
BY_HEADS = replace(BF16, num_ranks=0, num_heads=8)
FP8 = replace(BF16, dtype="fp8_e4m3", scales="per-tensor-09ab")


@pytest.mark.req("S126")
@pytest.mark.parametrize("kind", [BF16, FP8, BY_HEADS])
def test_a_fingerprint_holds_the_whole_format(kind: KvFormat) -> None:
    assert parse(str(kind)) == kind
    assert difference(str(kind), str(kind)) == ""
    assert "/" not in str(kind), "folders are named by it"


@pytest.mark.req("S126", "S57")
@pytest.mark.parametrize(
    ("theirs", "says"),
    [
        (FP8, r"fp8_e4m3 \(per-tensor-09ab\).*bfloat16 \(unscaled\)"),
        (replace(FP8, dtype="bfloat16"), "per-tensor-09ab"),
        (replace(BF16, model="cd"), "another model"),
        (replace(BF16, block_size=32), "32 tokens.*64"),
        (replace(BF16, num_ranks=1), "blocks on 1 rank,.*on 2 ranks.*cut by heads"),
        (replace(BF16, block="00"), "packs"),
        (BY_HEADS, "by 8 heads.*on 2 ranks: they run other releases"),
        (replace(BY_HEADS, num_heads=0, num_ranks=1, block="00"), "on 1 rank,.*on 2 ranks"),
    ],
)
def test_a_difference_is_explained_for_both_sides(theirs: KvFormat, says: str) -> None:
    text = difference(str(theirs), str(BF16), "prefill-0", "decode-0")
    assert text.startswith("prefill-0")
    assert "decode-0" in text
    assert re.search(says, text), text


def test_an_unknown_fingerprint_counts_as_another_engine() -> None:
    assert parse("0123456789abcdef") is None
    assert "another engine" in difference("0123456789abcdef", str(BF16))


@pytest.mark.req("S57")
def test_a_ranks_share_follows_from_the_heads() -> None:
    heads = str(BY_HEADS)
    assert kv_format.rank_bytes(heads, 800, our_ranks=1, their_ranks=4) == 200
    assert kv_format.rank_bytes(heads, 100, our_ranks=8, their_ranks=2) == 400
    assert kv_format.rank_bytes(heads, 100, our_ranks=16, their_ranks=8) == 100
    assert kv_format.rank_bytes(heads, 100, our_ranks=1, their_ranks=3) is None
    assert kv_format.rank_bytes(str(BF16), 100, our_ranks=2, their_ranks=2) == 100
    assert kv_format.rank_bytes(str(BF16), 100, our_ranks=2, their_ranks=1) is None
    assert kv_format.may_meet(heads, 2, 16)
    assert not kv_format.may_meet(heads, 2, 3)
    assert not kv_format.may_meet(heads, 2, 0)
