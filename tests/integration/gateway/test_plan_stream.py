"""The stream of plans: each answer belongs to its own query, whatever happens to the master."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdmesh.errors import Overloaded, Unavailable
from pdmesh.services.gateway.routing.plan_stream import PlanStream
from pdmesh.v1 import scheduler_service_pb2 as pb
from pdmesh.v1.common_pb2 import InstanceRecord
from tests.fakes.fake_master import FakeMaster, leader_at, serving
from tests.fakes.gateway_mesh import gateway_mesh


def question(num_queries: int) -> pb.PlanStreamRequest:
    request = pb.PlanRequest(gateway_id="g", queries=[pb.PlanQuery()] * num_queries)
    return pb.PlanStreamRequest(request=request)


def master_at(port: int) -> InstanceRecord:
    return InstanceRecord(service="master-scheduler", grpc_address=f"127.0.0.1:{port}")


@pytest.fixture
async def master() -> FakeMaster:
    return FakeMaster()


async def test_many_plan_queries_share_one_stream(master: FakeMaster) -> None:
    async with serving(master) as port:
        stream = PlanStream(master_at(port))
        for number in range(1, 20):
            assert (await stream.ask(question(number), 2.0)).epoch == number
        assert master.num_streams == 1
        await stream.close()


async def test_a_late_answer_is_never_taken_for_the_answer_to_the_next_query(
    master: FakeMaster,
) -> None:
    async with serving(master) as port:
        stream = PlanStream(master_at(port))
        assert (await stream.ask(question(1), 2.0)).epoch == 1
        master.is_silent = True
        with pytest.raises(Unavailable):
            await stream.ask(question(2), 0.1)
        master.is_silent = False
        assert (await stream.ask(question(3), 2.0)).epoch == 3
        await stream.close()


async def test_the_masters_error_reaches_the_caller_and_the_stream_opens_again(
    master: FakeMaster,
) -> None:
    async with serving(master) as port:
        stream = PlanStream(master_at(port))
        assert (await stream.ask(question(1), 2.0)).epoch == 1
        master.is_refusing = True
        with pytest.raises(Overloaded):
            await stream.ask(question(1), 2.0)
        master.is_refusing = False
        assert (await stream.ask(question(2), 2.0)).epoch == 2
        await stream.close()


@pytest.mark.fault("F11")
async def test_a_master_that_was_restarted_is_asked_again_without_an_error(
    master: FakeMaster,
) -> None:
    async with serving(master) as port:
        stream = PlanStream(master_at(port))
        assert (await stream.ask(question(1), 2.0)).epoch == 1
    async with serving(master, port):
        await asyncio.sleep(0.3)  # the channel's first attempt to reconnect may have failed
        assert (await stream.ask(question(2), 2.0)).epoch == 2
        await stream.close()


async def test_a_master_that_is_not_there_is_unavailable_in_time() -> None:
    stream = PlanStream(master_at(1))
    with pytest.raises(Unavailable):
        await stream.ask(question(1), 0.5)
    await stream.close()


class RefusingMaster(FakeMaster):
    """Ranks no instance, for the given reason."""

    def __init__(self, reason: str) -> None:
        super().__init__()
        self.reason, self.epoch = reason, 1

    async def Plan(self, request: pb.PlanRequest, context: Any) -> pb.PlanResponse:
        result = pb.PlanResult(error_reason=self.reason, error_message="because")
        return pb.PlanResponse(epoch=self.epoch, results=[result] * len(request.queries))


BODY = {"model": "tiny", "prompt": "abc", "max_tokens": 4}


@pytest.mark.fault("F12", "F13")
async def test_a_plan_of_an_older_epoch_has_no_effect(tmp_path: Path) -> None:
    """A zombie master says that no instance serves the model.

    A gateway that has heard the next leader ignores that, and ranks instances by itself (I7).
    """
    master = RefusingMaster("MODEL_NOT_FOUND")
    async with (
        gateway_mesh(tmp_path) as mesh,
        serving(master) as port,
        httpx.AsyncClient(timeout=60) as client,
    ):
        mesh.register(leader_at(port))
        statuses = []
        for master.epoch in (5, 4, 5, 6, 5):
            await asyncio.sleep(0.3)  # for a moment after a refused plan, the master is not asked
            answer = await client.post(f"{mesh.url}/v1/completions", json=BODY)
            statuses.append(answer.status_code)
        # The status is 503, not 404, for the gateway itself sees an instance of the model.
        assert statuses == [503, 200, 503, 503, 200]


@pytest.mark.req("S95")
@pytest.mark.parametrize(
    ("reason", "status", "code"),
    [
        ("PROMPT_TOO_LONG", 400, "context_length_exceeded"),
        ("MODEL_NOT_FOUND", 503, "no_instance"),  # the gateway has seen it served: 503, not 404
        ("NO_INSTANCE", 503, "no_instance"),
    ],
)
async def test_why_the_master_ranks_nothing_reaches_the_client(
    tmp_path: Path, reason: str, status: int, code: str
) -> None:
    async with (
        gateway_mesh(tmp_path) as mesh,
        serving(RefusingMaster(reason)) as port,
        httpx.AsyncClient() as client,
    ):
        mesh.register(leader_at(port))
        response = await client.post(f"{mesh.url}/v1/completions", json=BODY)
        assert (response.status_code, response.json()["error"]["code"]) == (status, code)
        assert ("retry-after" in response.headers) == (status == 503)


async def test_a_scenario_without_instances_is_named(tmp_path: Path) -> None:
    async with (
        gateway_mesh(tmp_path) as mesh,
        serving(RefusingMaster("SCENARIO_NOT_FOUND")) as port,
        httpx.AsyncClient() as client,
    ):
        mesh.register(leader_at(port))
        url = f"{mesh.url}/v1/completions"
        unknown = await client.post(url, json={**BODY, "scenario": "nobodys"})
        error = unknown.json()["error"]
        assert (unknown.status_code, error["param"], error["code"]) == (
            404,
            "scenario",
            "scenario_not_found",
        )
        away = await client.post(url, json=BODY)  # it was served earlier, so it is only away
        assert (away.status_code, away.json()["error"]["code"]) == (503, "no_instance")


async def test_a_scenario_without_instances_is_named_without_a_master(tmp_path: Path) -> None:
    """Found with schemathesis: an unknown scenario got a 503, as if a retry could help."""
    async with gateway_mesh(tmp_path) as mesh, httpx.AsyncClient() as client:
        url = f"{mesh.url}/v1/completions"
        unknown = await client.post(url, json={**BODY, "scenario": "nobodys"})
        error = unknown.json()["error"]
        assert (unknown.status_code, error["param"]) == (404, "scenario")
        assert "nobodys" in error["message"]
        assert (await client.post(url, json=BODY)).status_code == 200


class ForeseeingMaster(FakeMaster):
    """Names a pair that the gateway does not know as ready yet."""

    async def Plan(self, request: pb.PlanRequest, context: Any) -> pb.PlanResponse:
        result = pb.PlanResult(
            group_id="default",
            prefills=[pb.Candidate(instance_id="prefill-9", incarnation=9)],
            decodes=[pb.Candidate(instance_id="decode-0", incarnation=9)],
        )
        return pb.PlanResponse(epoch=1, results=[result] * len(request.queries))


@pytest.mark.req("S10", "S25")
async def test_a_plan_whose_instances_the_gateway_does_not_know_yet_fails_no_request(
    tmp_path: Path,
) -> None:
    """Found by the nemesis: a new prefill's record reached the master some milliseconds earlier
    than the gateway, and a request got a 503.
    """
    async with (
        gateway_mesh(tmp_path) as mesh,
        serving(ForeseeingMaster()) as port,
        httpx.AsyncClient() as client,
    ):
        mesh.register(leader_at(port))
        response = await client.post(f"{mesh.url}/v1/completions", json=BODY)
        assert response.status_code == 200, response.text
