"""The kinds of work that each role accepts."""

from __future__ import annotations

import pytest

from pdmesh.core.instance.admission import Work
from pdmesh.core.instance.role_work import DEFAULT_SLOTS, WORKS, keeps_kv
from pdmesh.core.model import Role


@pytest.mark.req("S3")
def test_only_a_fusion_takes_prompts_and_hand_overs() -> None:
    both = [role for role, works in WORKS.items() if {Work.PREFILL, Work.DECODE} <= works]
    assert both == [Role.FUSION]
    assert DEFAULT_SLOTS.keys() == WORKS.keys()


def test_an_instance_that_makes_answers_keeps_kv_and_no_other() -> None:
    keeping = {role for role in WORKS if keeps_kv(role)}
    assert keeping == {role for role, works in WORKS.items() if Work.LOCAL in works}
