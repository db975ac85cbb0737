"""Without a master a gateway ranks instances by its own open legs, fewest first (S42)."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.services.gateway.routing.fleet import FleetView
from pdmesh.v1.common_pb2 import INSTANCE_PHASE_READY, ROLE_DECODE, ROLE_PREFILL, InstanceRecord
from tests.fakes.memory_registry import MemoryStore, MemoryView

_NUM_EACH = 5
_EVENTS = st.lists(st.tuples(st.booleans(), st.integers(0, 2 * _NUM_EACH - 1)), max_size=60)


def fleet(gateway_id: str = "") -> FleetView:
    store = MemoryStore()
    for name, role in (("p", ROLE_PREFILL), ("d", ROLE_DECODE)):
        for i in range(_NUM_EACH):
            store.records[f"{name}-{i}"] = InstanceRecord(
                instance_id=f"{name}-{i}",
                incarnation=1,
                role=role,
                model="m",
                phase=INSTANCE_PHASE_READY,
            )
    return FleetView(MemoryView(store), "m", lambda: 0.0, gateway_id=gateway_id)


@pytest.mark.req("S42")
@given(_EVENTS)
def test_those_with_the_fewest_open_legs_come_first_whatever_opened_and_closed(
    events: list[tuple[bool, int]],
) -> None:
    ranked_by, num_open = fleet(), Counter[str]()
    idle = ranked_by.least_loaded("m", "", (), lambda name, _: 0)
    tie = {c.instance_id: place for role in idle for place, c in enumerate(role)}
    names = [f"{role}-{i}" for role in "pd" for i in range(_NUM_EACH)]
    for is_opened, index in events:
        num_open[names[index]] += 1 if is_opened else -min(1, num_open[names[index]])
        found = ranked_by.least_loaded("m", "", (), lambda name, _: num_open[name])
        for role, candidates in zip("pd", found, strict=True):
            ranked = [c.instance_id for c in candidates]
            assert sorted(ranked) == [name for name in names if name.startswith(role)]
            assert ranked == sorted(ranked, key=lambda name: (num_open[name], tie[name]))


@pytest.mark.req("S42")
def test_gateways_that_rank_alone_do_not_all_begin_with_the_same_one() -> None:
    """Each order is its gateway's own, and stays the same: two hundred gateways begin with all of
    them.
    """
    firsts = Counter[str]()
    for number in range(200):
        gateway = fleet(f"gateway-{number}")
        prefills, _ = gateway.least_loaded("m", "", (), lambda name, _: 0)
        again, _ = gateway.least_loaded("m", "", (), lambda name, _: 0)
        assert prefills == again
        firsts[prefills[0].instance_id] += 1
    assert len(firsts) == _NUM_EACH
    assert max(firsts.values()) < 2 * 200 / _NUM_EACH
