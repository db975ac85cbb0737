"""The numbers of instances by role. A data-parallel domain counts as one."""

from __future__ import annotations

import pytest

from pdmesh.cli.view.counts import rank_text, ready_counts
from pdmesh.v1.admin_service_pb2 import GroupMember
from pdmesh.v1.common_pb2 import (
    INSTANCE_PHASE_LOADED,
    INSTANCE_PHASE_READY,
    ROLE_DECODE,
    ROLE_PREFILL,
    Domain,
)


def rank(n: int, domain_id: str = "chat-d7", *, is_ready: bool = True) -> GroupMember:
    return GroupMember(
        role=ROLE_DECODE,
        phase=INSTANCE_PHASE_READY if is_ready else INSTANCE_PHASE_LOADED,
        domain=Domain(domain_id=domain_id, dp_rank=n, dp_size=2),
    )


@pytest.mark.req("S121")
def test_a_domain_is_ready_when_all_of_its_ranks_are() -> None:
    prefill = GroupMember(role=ROLE_PREFILL, phase=INSTANCE_PHASE_READY)
    whole = [rank(0), rank(1)]
    half = [rank(0, "chat-d8"), rank(1, "chat-d8", is_ready=False)]
    assert ready_counts([prefill, *whole, *half]) == "1P:1D"


def test_a_rank_is_shown_with_its_domain() -> None:
    assert rank_text(rank(0).domain) == "chat-d7 0/2"
    assert rank_text(Domain()) == ""
