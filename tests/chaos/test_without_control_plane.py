"""The whole control plane is dead for a minute, and an instance dies in that time.

Serving continues, and no client notices (S10).
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pdmesh.launcher.mesh import Mesh
from pdmesh.net.nats.bus import NatsBus
from tests.support.sites import fleet
from tests.support.sites.groups import asking
from tests.support.sites.operator import CHANGE_S, Operator
from tests.support.waiting import until

CONTROL_PLANE = ("master-scheduler", "health-monitor", "kv-cache-index")
DEAD_S = 60.0
GROUPS = "groups:\n  default: {prefill: 2, decode: 2}\n"


@pytest.mark.timeout(240)
@pytest.mark.req("S10")
@pytest.mark.fault("F11")
async def test_a_minute_without_the_control_plane_and_with_a_dead_instance_fails_no_request(
    tmp_path: Path,
) -> None:
    async with Mesh(fleet.two_by_two(), tmp_path / "mesh") as mesh:
        bus = await NatsBus.connect(mesh.nats_url, "test")
        operator = Operator(bus)
        await operator.apply(GROUPS)
        await operator.until_serving(2, 2)
        async with asking(mesh.http_url) as outcomes:
            await until(lambda: len(outcomes) > 10, within_s=CHANGE_S)
            mesh.supervisor.lose(list(CONTROL_PLANE))
            num_before = len(outcomes)
            await asyncio.sleep(DEAD_S / 2)  # the length of the outage, which the test is about
            mesh.kill("prefill-0")
            await asyncio.sleep(DEAD_S / 2)
            num_meanwhile = len(outcomes) - num_before
            for name in CONTROL_PLANE:
                mesh.supervisor.start(mesh.supervisor.specs[name])
            await operator.until_serving(2, 2)
            num_after = len(outcomes)
            await until(lambda: len(outcomes) > num_after, within_s=CHANGE_S)
        assert num_meanwhile > DEAD_S  # more than one request per second
        assert [o for o in outcomes if not o.is_complete] == []
        await bus.close()
