"""An instance as a rank of a data-parallel domain.

The tests cover the address where the ranks meet, and the rank in the assignment and the record.
"""

from __future__ import annotations

import socket

import pytest

from pdmesh.core.instance import lifecycle_events as life
from pdmesh.core.instance.lifecycle import InstanceLife
from pdmesh.core.model import Assignment, DomainRank, Phase, Role, RoleSpec, Stage
from pdmesh.errors import InvalidRequest
from pdmesh.instance.incarnation.assignment import assignment_from
from pdmesh.instance.incarnation.domain_address import MeetingPoint
from pdmesh.services.master_scheduler.groups.group_convert import assignment_to, seen_from
from pdmesh.v1.common_pb2 import INSTANCE_PHASE_READY, Domain, InstanceRecord

RANK = DomainRank("chat-d7", 1, 2, "10.0.0.1:29550")


def assigned(domain: DomainRank | None, assignment_id: int = 7) -> Assignment:
    role_spec = RoleSpec(Role.DECODE, "chat", "default", "r1", domain=domain)
    return Assignment(5, 1, assignment_id, Stage.LOAD, role_spec)


@pytest.mark.req("S121")
@pytest.mark.parametrize("domain", [RANK, None])
def test_an_assignment_keeps_the_rank_on_its_way(domain: DomainRank | None) -> None:
    assert assignment_from(assignment_to("i-0", assigned(domain))) == assigned(domain)


@pytest.mark.parametrize(
    ("domain", "field"),
    [
        (Domain(domain_id="d", dp_rank=2, dp_size=2), "domain.dp_rank"),
        (Domain(dp_rank=0, dp_size=2), "domain.domain_id"),
    ],
)
def test_an_impossible_rank_is_refused_with_its_field(domain: Domain, field: str) -> None:
    message = assignment_to("i-0", assigned(RANK))
    message.domain.CopyFrom(domain)
    with pytest.raises(InvalidRequest) as error:
        assignment_from(message)
    assert error.value.field == field
    record = InstanceRecord(instance_id="i-0", phase=INSTANCE_PHASE_READY, domain=domain)
    seen = seen_from(record, 0)
    assert seen is not None
    assert seen.domain is None


def test_an_incarnation_is_a_rank_of_one_formation_only() -> None:
    """The leader died after it had informed some of the ranks. The next leader forms another
    domain.
    """
    instance = InstanceLife(5)
    instance.handle(life.Assigned(assigned(RANK)), 0.0)
    other = DomainRank("chat-d9", 1, 2, "10.0.0.2:29550")
    assert instance.handle(life.Assigned(assigned(other, 9)), 1.0) == [life.Ignored.OTHER_ROLE]
    assert instance.role_spec is not None
    assert instance.role_spec.domain == RANK
    assert instance.phase is Phase.LOADING


def test_a_blank_instance_keeps_its_port_until_its_engine_needs_it() -> None:
    point = MeetingPoint("127.0.0.1", "node-3", 0)
    host, port = point.address.split(":")
    assert host == "node-3"
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", int(port)))
    point.give_up()
    point.give_up()
    with socket.socket() as engine:
        engine.bind(("127.0.0.1", int(port)))


def test_a_port_that_the_settings_name_is_announced_as_it_is() -> None:
    assert MeetingPoint("::1", "::1", 29550).address == "[::1]:29550"
