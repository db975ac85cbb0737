"""A master's orders about single instances stay in effect when no master leads (S42, S10).

In that time, gateways rank instances themselves.
"""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from pdmesh.events.v1.events_pb2 import RequestFinished
from pdmesh.launcher.mesh import Mesh
from pdmesh.net import subjects
from pdmesh.net.bus import Message
from pdmesh.net.events import decode_event
from pdmesh.net.nats.bus import NatsBus
from pdmesh.v1 import admin_service_pb2 as pb
from pdmesh.v1.common_pb2 import ROLE_DECODE
from tests.support.sites import fleet
from tests.support.sites.operator import CHANGE_S, Operator
from tests.support.streams import stream_completion
from tests.support.waiting import until

NUM_REQUESTS = 24
CORDONED, DRAINED = "prefill-0", "decode-1"
# The scenario must keep two decodes and there is no blank instance, so the drained decode stays.
GROUPS = "groups:\n  default: {prefill: 2, decode: 2}\n"


def num_ranked_here(mesh: Mesh) -> float:
    found = fleet.samples(mesh, "gateway-0")
    return sum(
        value
        for name, labels, value in found
        if name == "pdmesh_gateway_plans_total" and labels.get("source") == "fallback"
    )


@pytest.mark.timeout(180)
@pytest.mark.req("S10", "S36", "S42")
@pytest.mark.fault("F11")
async def test_cordoned_instances_get_nothing_while_no_master_leads(tmp_path: Path) -> None:
    finished: list[RequestFinished] = []
    async with Mesh(fleet.two_by_two(), tmp_path / "mesh") as mesh, httpx.AsyncClient() as client:
        bus = await NatsBus.connect(mesh.nats_url, "test")

        async def on_finished(message: Message) -> None:
            finished.append(decode_event(message, RequestFinished))

        await bus.subscribe(subjects.request_finished(), on_finished)
        operator = Operator(bus)

        async def ask() -> set[str]:
            """Send requests, and return the instances that served them."""
            finished.clear()
            for i in range(NUM_REQUESTS):
                prompt = [40 + (7 * i + k) % 80 for k in range(30)]
                outcome = await stream_completion(client, mesh.http_url, prompt, 4)
                assert outcome.is_complete, outcome
            await until(lambda: len(finished) == NUM_REQUESTS, within_s=CHANGE_S)
            return {f.prefill_id for f in finished} | {f.decode_id for f in finished}

        await operator.cordon(CORDONED, pb.LEAVE_MODE_AT_ONCE)
        mesh.supervisor.lose(["master-scheduler"])
        assert CORDONED not in await ask()
        assert num_ranked_here(mesh) >= NUM_REQUESTS

        mesh.supervisor.start(mesh.supervisor.specs["master-scheduler"])
        await operator.uncordon(CORDONED)
        await operator.apply(GROUPS)
        await operator.until_serving(2, 2)
        await operator.cordon(DRAINED, pb.LEAVE_MODE_DRAIN)
        await until(lambda: waits(operator), within_s=CHANGE_S)
        # The drained decode serves until a substitute is there.
        assert DRAINED in await operator.members(ROLE_DECODE)
        mesh.supervisor.lose(["master-scheduler"])
        assert DRAINED not in await ask()
        await bus.close()


async def waits(operator: Operator) -> bool:
    """Whether the group's detail says that the drained decode must stay."""
    (group,) = (await operator.groups()).groups
    return "would be left with" in group.detail
