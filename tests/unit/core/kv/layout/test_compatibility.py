"""Engines may exchange KV only if their fingerprints are equal.

A refusal names the difference.
"""

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
STAGED = replace(BF16, num_ranks=1, stages=(16, 15))
STAGED_BY_HEADS = replace(BY_HEADS, stages=(16, 15))
FP8 = replace(BF16, dtype="fp8_e4m3", scales="per-tensor-09ab")


@pytest.mark.req("S126")
@pytest.mark.parametrize("kind", [BF16, FP8, BY_HEADS, STAGED, STAGED_BY_HEADS])
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
        (STAGED, r"pipeline of 16 \+ 15 layers, decode-0 no pipeline.*pipeline_parallel_size"),
        (replace(BY_HEADS, num_heads=0, num_ranks=1, block="00"), "on 1 rank,.*on 2 ranks"),
    ],
)
def test_a_difference_is_explained_for_both_sides(theirs: KvFormat, says: str) -> None:
    text = difference(str(theirs), str(BF16), "prefill-0", "decode-0")
    assert text.startswith("prefill-0")
    assert "decode-0" in text
    assert re.search(says, text), text


@pytest.mark.req("S120")
def test_without_stages_a_fingerprint_is_what_it_was_before_there_were_any() -> None:
    assert str(BF16) == "ab12.bfloat16.unscaled.b64.77fe.tp2"
    assert str(BY_HEADS) == "ab12.bfloat16.unscaled.b64.77fe.heads8"
    assert str(STAGED) == "ab12.bfloat16.unscaled.b64.77fe.tp1.pp16-15"


@pytest.mark.req("S120", "S57")
@pytest.mark.parametrize("kind", [STAGED, STAGED_BY_HEADS])
def test_two_ranks_of_one_stage_never_meet_two_stages_of_one_rank(kind: KvFormat) -> None:
    """Both kinds of instance have two addresses. Only the fingerprints differ, and the pulling side
    compares them.
    """
    beside = replace(kind, stages=(), num_ranks=2 * kind.num_ranks)
    others = [beside, replace(kind, stages=(15, 16)), replace(kind, stages=(11, 10, 10))]
    for other in others:
        assert str(other) != str(kind)
        assert "layers" in difference(str(other), str(kind))
        assert "layers" in difference(str(kind), str(other))


@pytest.mark.req("S120", "S57")
def test_in_a_pipeline_the_ranks_of_a_stage_share_its_heads() -> None:
    heads = str(STAGED_BY_HEADS)  # the model has 8 heads
    assert kv_format.rank_bytes(heads, 800, our_ranks=2, their_ranks=8) == 200
    assert kv_format.rank_bytes(heads, 100, our_ranks=8, their_ranks=2) == 400
    assert kv_format.rank_bytes(heads, 100, our_ranks=2, their_ranks=1) is None
    assert kv_format.rank_bytes(heads, 100, our_ranks=2, their_ranks=3) is None
    assert kv_format.rank_bytes(str(STAGED), 100, our_ranks=2, their_ranks=2) == 100
    assert kv_format.rank_bytes(str(STAGED), 100, our_ranks=2, their_ranks=4) is None
    assert kv_format.may_meet(heads, 2, 4)
    assert not kv_format.may_meet(heads, 2, 0)


@pytest.mark.parametrize("stages", ["pp16", "pp0-2", "pp1-", "pp"])
def test_a_fingerprint_with_impossible_stages_counts_as_another_engine(stages: str) -> None:
    assert parse(f"ab12.bfloat16.unscaled.b64.77fe.tp1.{stages}") is None


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


@pytest.mark.req("S120")
@pytest.mark.parametrize(
    ("kind", "num_ranks", "expected"),
    [(BY_HEADS, 4, 4 * 320), (STAGED, 2, 320 + 300), (STAGED_BY_HEADS, 4, 2 * (320 + 300))],
)
def test_all_ranks_have_the_bytes_of_their_own_stages(
    kind: KvFormat, num_ranks: int, expected: int
) -> None:
    assert kv_format.all_bytes(str(kind), 320, num_ranks) == expected
    assert kv_format.all_bytes("sim", 320, num_ranks) == 320 * num_ranks
