"""The numbers that the master reads from load reports and writes into plans."""

from __future__ import annotations

from pdmesh.core.placement.fleet import PrefillComputed
from pdmesh.core.placement.plan import Plan
from pdmesh.events.v1.events_pb2 import InstanceLoad
from pdmesh.services.master_scheduler.placement.convert import result_to
from pdmesh.services.master_scheduler.placement.fleet_feed import load_from


def test_an_instance_of_the_version_before_does_not_say_who_decoded_beside() -> None:
    event = InstanceLoad(
        num_slots=8,
        computed=[
            InstanceLoad.Computed(request_id="old", num_tokens=10, seconds=0.1, num_steps=1),
            InstanceLoad.Computed(request_id="none", num_tokens=10, seconds=0.1, num_beside=0.0),
            InstanceLoad.Computed(request_id="some", num_tokens=10, seconds=0.1, num_beside=2.5),
        ],
    )
    assert [c.num_beside for c in load_from(event).computed] == [None, 0.0, 2.5]
    assert load_from(event).computed[0] == PrefillComputed("old", 10, 0, 0.1, 1, None)


def test_an_expected_time_of_less_than_a_millisecond_is_not_unknown() -> None:
    assert result_to("r", Plan("g", (), (), first_token_s=0.5)).first_token_ms == 500
    assert result_to("r", Plan("g", (), (), first_token_s=0.0001)).first_token_ms == 1
    assert result_to("r", Plan("g", (), (), first_token_s=1e9)).first_token_ms == 2**32 - 1
