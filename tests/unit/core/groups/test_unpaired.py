"""Instances of a group that are ready and pair with none of the other role are named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdmesh.core.groups.unpaired import ReadyInstance, unpaired
from pdmesh.core.kv.layout.compatibility import KvFormat
from pdmesh.core.model import Role

MODEL, WITH_DRAFT = (str(KvFormat(m, "f32", "unscaled", 64, "ab", 1)) for m in ("aa", "bb"))
P0 = ReadyInstance("prefill-0", Role.PREFILL, MODEL)
D0 = ReadyInstance("decode-0", Role.DECODE, MODEL)


def test_a_group_whose_instances_pair_has_no_line() -> None:
    assert unpaired({"g": [P0, D0, replace(P0, instance_id="prefill-1")]}) == []


@pytest.mark.req("S67", "S126")
def test_a_decode_with_a_draft_that_the_prefills_lack_is_named_with_one_of_them() -> None:
    d1 = replace(D0, instance_id="decode-1", model_fingerprint=WITH_DRAFT)
    line = (
        "group g: prefill-0 and decode-1 exchange no KV: "
        "prefill-0 runs another model, draft, number format or engine version than decode-1"
    )
    assert unpaired({"g": [d1, P0]}) == [line]
    assert unpaired({"g": [d1, P0, D0], "h": [P0, D0]}) == [line]


def test_each_kind_without_a_partner_has_a_line_however_many_instances_are_of_it() -> None:
    others = [replace(P0, instance_id=f"prefill-{n}", model_fingerprint=WITH_DRAFT) for n in (1, 2)]
    (line,) = unpaired({"g": [P0, D0, *others]})
    assert line.startswith("group g: prefill-1 and decode-0 ")


def test_revisions_and_regions_keep_instances_apart_too() -> None:
    (line,) = unpaired({"g": [replace(P0, revision="r1"), D0]})
    assert line.endswith("they were assigned different revisions")
    (line,) = unpaired({"g": [replace(P0, kv_region="eu"), replace(D0, kv_region="us")]})
    assert line.endswith("their regions differ")


def test_a_group_with_one_role_only_or_with_fusion_has_no_line() -> None:
    fusion = replace(P0, role=Role.FUSION, model_fingerprint=WITH_DRAFT)
    assert unpaired({"g": [P0], "h": [D0], "i": [P0, D0, fusion], "j": []}) == []
