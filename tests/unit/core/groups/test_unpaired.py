"""Pairs of a prefill and a decode that cannot connect.

One instance of the pair is given up, and ready instances without a partner are reported.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdmesh.core.groups.cluster_state import InstanceStatus
from pdmesh.core.groups.round import GroupMember
from pdmesh.core.groups.unpaired import ReadyInstance, is_to_blame, unpaired
from pdmesh.core.kv.layout.compatibility import KvFormat
from pdmesh.core.model import Assignment, Phase, Role, RoleSpec, Stage

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


@pytest.mark.req("S24", "S57")
def test_blocks_cut_by_heads_never_meet_the_opaque_ones_of_an_earlier_release() -> None:
    """Earlier releases kept opaque blocks for vLLM on a CPU. During an upgrade, both releases may
    be in one group.
    """
    by_heads = str(KvFormat("aa", "f32", "unscaled", 64, "cd", num_heads=4))
    new = replace(D0, instance_id="decode-1", model_fingerprint=by_heads)
    (line,) = unpaired({"g": [P0, D0, new]})
    assert line == (
        "group g: prefill-0 and decode-1 exchange no KV: prefill-0 keeps opaque blocks on 1 rank, "
        "decode-1 its KV by 4 heads: they run other releases of pdmesh or other attention kernels"
    )


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


def member(instance_id: str, role: Role, stage: Stage = Stage.CONNECT) -> GroupMember:
    phase = Phase.READY if stage is Stage.SERVE else Phase.CONNECTING
    seen = InstanceStatus(instance_id, 1, phase, role)
    return GroupMember(seen, Assignment(1, 1, 1, stage, RoleSpec(role, "g", "default")))


@pytest.mark.req("S16", "S35")
def test_the_one_that_fails_in_more_pairs_is_given_up_and_of_equals_the_decode() -> None:
    p0, p1 = (member(f"p{n}", Role.PREFILL) for n in range(2))
    d0, d1 = (member(f"d{n}", Role.DECODE) for n in range(2))
    odd_prefill = [(d0, p0), (d1, p0)]
    assert is_to_blame(p0, d0, odd_prefill)
    assert not is_to_blame(d0, p0, odd_prefill)
    odd_decode = [(d0, p0), (d0, p1)]
    assert is_to_blame(d0, p0, odd_decode)
    assert not is_to_blame(p0, d0, odd_decode)
    assert is_to_blame(d0, p0, [(d0, p0)])
    assert not is_to_blame(p0, d0, [(d0, p0)])


@pytest.mark.req("S25", "S35")
def test_one_that_serves_is_never_given_up_for_one_that_joins() -> None:
    serving = [member(f"p{n}", Role.PREFILL, Stage.SERVE) for n in range(2)]
    joins = member("d0", Role.DECODE)
    assert is_to_blame(joins, serving[0], [(joins, serving[0])])
    late = member("p9", Role.PREFILL)
    decodes = [member(f"d{n}", Role.DECODE, Stage.SERVE) for n in range(2)]
    assert is_to_blame(late, decodes[0], [(decodes[0], late)])
