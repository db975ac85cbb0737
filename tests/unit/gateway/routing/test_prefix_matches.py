"""A gateway's question about cached prefixes outlives a change of leader."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from pdmesh.services.gateway.routing.scenarios import PrefixMatches
from pdmesh.v1.common_pb2 import InstanceRecord
from pdmesh.v1.scheduler_service_pb2 import MatchPrefixRequest, MatchPrefixResponse


class Master:
    """A master that answers only once `may_answer` is set."""

    def __init__(self) -> None:
        self.asked, self.may_answer = asyncio.Event(), asyncio.Event()

    async def answer(self, request: MatchPrefixRequest, _: object) -> MatchPrefixResponse:
        self.asked.set()
        await self.may_answer.wait()
        return MatchPrefixResponse(num_blocks={"chat": len(request.block_hashes)})


async def served(master: Master, name: str) -> tuple[grpc.aio.Server, InstanceRecord]:
    server = grpc.aio.server()
    method = grpc.unary_unary_rpc_method_handler(
        master.answer, MatchPrefixRequest.FromString, MatchPrefixResponse.SerializeToString
    )
    service = "pdmesh.v1.SchedulerService"
    handler = grpc.method_handlers_generic_handler(service, {"MatchPrefix": method})
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    record = InstanceRecord(instance_id=name, grpc_address=f"127.0.0.1:{port}", is_leader=True)
    return server, record


@pytest.mark.asyncio
async def test_a_question_on_its_way_is_answered_although_another_master_leads_now() -> None:
    old, new = Master(), Master()
    (old_server, old_record), (new_server, new_record) = await asyncio.gather(
        served(old, "m-0"), served(new, "m-1")
    )
    leaders = [old_record]
    fleet: Any = SimpleNamespace(masters=lambda: leaders)
    matches = PrefixMatches(fleet, "g-0", timeout_s=60.0)
    try:
        first = asyncio.create_task(matches.held_by_scenario([b"a" * 16]))
        await old.asked.wait()
        leaders[:] = [new_record]
        new.may_answer.set()
        assert await matches.held_by_scenario([b"a" * 16, b"b" * 16]) == {"chat": 2}
        old.may_answer.set()
        assert await first == {"chat": 1}
    finally:
        await matches.close()
        await asyncio.gather(old_server.stop(None), new_server.stop(None))


@pytest.mark.asyncio
async def test_a_question_that_the_gateways_end_cuts_off_has_no_answer() -> None:
    master = Master()
    server, record = await served(master, "m-0")
    fleet: Any = SimpleNamespace(masters=lambda: [record])
    matches = PrefixMatches(fleet, "g-0", timeout_s=60.0)
    asked = asyncio.create_task(matches.held_by_scenario([b"a" * 16]))
    await master.asked.wait()
    await matches.close()
    assert await asked == {}
    master.may_answer.set()
    await server.stop(None)
