"""A schedule lends a group and takes it back, at set times of the real clock (S11, S21).

The test takes minutes, because cron has no shorter intervals.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from pdmesh.launcher.mesh import Mesh
from pdmesh.launcher.spec import MeshSpec
from pdmesh.net.nats.bus import NatsBus
from tests.support.sites.groups import asking
from tests.support.sites.operator import CHANGE_S, Operator
from tests.support.waiting import until

GROUPS = """
groups:
  chat: {{count: 3, prefill: 1, decode: 1}}
schedules:
  - {{at: "{lend}", scenario: default, lend: 1}}
  - {{at: "{reclaim}", scenario: default, reclaim: 1}}
"""
LEAD_S = 300  # a reclaim begins this early, unless measured set-ups take longer


def cron(wall: float) -> str:
    return time.strftime("%M %H * * *", time.gmtime(wall))


@pytest.mark.timeout(420)
@pytest.mark.req("S11", "S21")
async def test_a_lent_group_is_back_in_time_and_no_request_fails(
    tmp_path: Path,
) -> None:
    spec = MeshSpec(
        engine="sim", num_prefill=0, num_decode=0, num_blank=6, http_port=0, grpc_port=0
    )
    async with Mesh(spec, tmp_path / "mesh") as mesh:
        bus = await NatsBus.connect(mesh.nats_url, "test")
        operator = Operator(bus)

        async def num_serving() -> int:
            return sum(g.state == "serving" for g in (await operator.groups()).groups)

        async def pools() -> list[str]:
            return [a.pool for a in (await operator.groups()).adjustments]

        lend_at = (time.time() + 30) // 60 * 60 + 60
        back_at = lend_at + LEAD_S + 60
        await operator.apply(GROUPS.format(lend=cron(lend_at), reclaim=cron(back_at)))

        async def are_three() -> bool:
            return await num_serving() == 3

        async def is_lent() -> bool:
            return await pools() == ["training"] and await num_serving() == 2

        async def is_back() -> bool:
            return not await pools() and await num_serving() == 3

        await until(are_three, within_s=CHANGE_S)
        async with asking(mesh.http_url) as outcomes:
            await until(is_lent, within_s=lend_at - time.time() + CHANGE_S)
            assert time.time() >= lend_at
            await until(is_back, within_s=60 + CHANGE_S)
            assert time.time() < back_at
        assert [o for o in outcomes if not o.is_complete] == []
        await bus.close()
