"""Runs blank instances, processes without a role, under a desired state that makes groups of them.
The groups form, change and heal, and no client may notice.
"""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from pdmesh.errors import InvalidRequest
from pdmesh.launcher.mesh import Mesh
from pdmesh.net.nats.bus import NatsBus
from pdmesh.v1 import admin_service_pb2 as pb
from pdmesh.v1.common_pb2 import ROLE_DECODE, ROLE_PREFILL
from tests.support.sites.groups import asking, spec
from tests.support.sites.operator import CHANGE_S, Operator
from tests.support.streams import stream_completion
from tests.support.waiting import until

TWO_BY_TWO = "groups:\n  chat: {prefill: 2, decode: 2}\n"
THREE_BY_ONE = """
scenarios:
  default: {allow_single: true}
groups:
  chat: {prefill: 3, decode: 1}
"""


@pytest.mark.timeout(300)
@pytest.mark.req("S10", "S15", "S19", "S23", "S25", "S26", "S28", "S35", "S36", "S73")
@pytest.mark.fault("F1", "F11")
async def test_blank_instances_become_a_group_that_changes_and_heals_while_it_serves(
    tmp_path: Path,
) -> None:
    file = tmp_path / "groups.yaml"
    file.write_text(TWO_BY_TWO)
    async with Mesh(spec(file, num_blank=6), tmp_path / "mesh") as mesh:
        bus = await NatsBus.connect(mesh.nats_url, "test")
        operator = Operator(bus)
        await operator.listen()
        await operator.until_serving(2, 2)
        assert len((await operator.groups()).blank_instance_ids) == 2

        async with asking(mesh.http_url) as outcomes:
            await until(lambda: len(outcomes) > 10, within_s=CHANGE_S)
            with pytest.raises(InvalidRequest, match=r"line 2: groups\.chat\.decode"):
                await operator.apply("groups:\n  chat: {prefill: 2}\n")
            assert (await operator.apply(THREE_BY_ONE)).version == 2
            await operator.until_serving(3, 1)
            num_before = len(outcomes)
            await until(lambda: len(outcomes) > num_before + 10, within_s=CHANGE_S)
        assert [o for o in outcomes if not o.is_complete] == []
        _check_order(operator)

        operator.steps.clear()
        lost = (await operator.members(ROLE_PREFILL))[0]
        others = {name: mesh.pid(name) for name in mesh.names if name != lost}
        mesh.kill(lost)
        await until(lambda: "lost" in operator.of(lost), within_s=CHANGE_S)
        await operator.until_serving(3, 1)
        assigned = [s for s in operator.steps if s.step == "assigned"]
        assert [s.replaces for s in assigned] == [lost]
        # The killed instance is back, but another instance has taken its place.
        assert assigned[0].instance_id != lost
        assert {name: mesh.pid(name) for name in others} == others
        async with httpx.AsyncClient(timeout=60) as client:
            outcome = await stream_completion(client, mesh.http_url, [41, 42, 43], 8)
        assert outcome.is_complete
        await bus.close()


def _check_order(operator: Operator) -> None:
    """Assert that the new prefill was ready before a decode left, and that the steps of these two
    instances came in order.
    """
    ready = [s for s in operator.steps if s.step == "ready" and s.role == "prefill"]
    draining = [s for s in operator.steps if s.step == "draining"]
    assert [s.role for s in draining] == ["decode"]
    new = [s.instance_id for s in operator.steps if s.step == "assigned"][-1]
    names = ["assigned", "loaded", "connecting", "connected", "serving", "ready"]
    assert [s for s in operator.of(new) if s in names] == names
    assert operator.steps.index(ready[-1]) < operator.steps.index(draining[0])
    leaving = draining[0].instance_id
    left = operator.of(leaving)[operator.of(leaving).index("draining") :]
    assert left[:4] == ["draining", "drained", "disconnected", "released"]


@pytest.mark.timeout(300)
@pytest.mark.fault("F11", "F13")
async def test_a_set_up_continues_under_another_leader_and_a_drained_instance_is_replaced(
    tmp_path: Path,
) -> None:
    running = spec(None, num_blank=5, num_masters=2)
    async with Mesh(running, tmp_path / "mesh") as mesh:
        bus = await NatsBus.connect(mesh.nats_url, "test")
        operator = Operator(bus)
        await operator.listen()
        await operator.apply(TWO_BY_TWO)
        await until(lambda: operator.steps, within_s=CHANGE_S)
        leader = operator.steps[0].header.publisher_id
        mesh.kill(leader)
        await operator.until_serving(2, 2)
        await until(lambda: len({s.epoch for s in operator.steps}) > 1, within_s=CHANGE_S)
        assert len([s for s in operator.steps if s.step == "assigned"]) == 4

        going = (await operator.members(ROLE_DECODE))[0]
        async with asking(mesh.http_url) as outcomes:
            await operator.cordon(going, pb.LEAVE_MODE_DRAIN)
            await until(lambda: "released" in operator.of(going), within_s=CHANGE_S)
            await operator.until_serving(2, 2)
        assert [o for o in outcomes if not o.is_complete] == []
        assert going not in await operator.members(ROLE_DECODE)
        assert [h.instance_id for h in (await operator.groups()).out_of_service] == [going]
        await bus.close()
