"""Tests the stream on which a gateway asks the master for plans. A plan names the instances that
may serve a request. Each answer must belong to its query, whatever happens to the master.
"""

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
        await asyncio.sleep(0.3)  # long enough for a first failed attempt to reconnect
        assert (await stream.ask(question(2), 2.0)).epoch == 2
        await stream.close()


async def test_a_master_that_is_not_there_is_unavailable_in_time() -> None:
    stream = PlanStream(master_at(1))
    with pytest.raises(Unavailable):
        await stream.ask(question(1), 0.5)
    await stream.close()


class RefusingMaster(FakeMaster):
    """A master that ranks no instance, for the given reason."""

    def __init__(self, reason: str) -> None:
        super().__init__()
        self.reason, self.epoch = reason, 1

    async def Plan(self, request: pb.PlanRequest, context: Any) -> pb.PlanResponse:
        result = pb.PlanResult(error_reason=self.reason, error_message="because")
        return pb.PlanResponse(epoch=self.epoch, results=[result] * len(request.queries))


BODY = {"model": "tiny", "prompt": "abc", "max_tokens": 4}


@pytest.mark.fault("F12", "F13")
async def test_a_plan_of_an_older_epoch_has_no_effect(tmp_path: Path) -> None:
    """A former leader says that no instance serves the model.

    A gateway that has heard from the next leader ignores the answer and ranks the instances itself
    (I7).
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
            # After a refused plan, the gateway waits for a moment before it asks the master again.
            await asyncio.sleep(0.3)
            answer = await client.post(f"{mesh.url}/v1/completions", json=BODY)
            statuses.append(answer.status_code)
        # The status is 503 and not 404, because the gateway itself knows an instance of the model.
        assert statuses == [503, 200, 503, 503, 200]


@pytest.mark.req("S95")
@pytest.mark.parametrize(
    ("reason", "status", "code"),
    [
        ("PROMPT_TOO_LONG", 400, "context_length_exceeded"),
        # The status is 503 and not 404, because the gateway has seen instances of the model.
        ("MODEL_NOT_FOUND", 503, "no_instance"),
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
        # The scenario was served earlier, so its instances are only away.
        away = await client.post(url, json=BODY)
        assert (away.status_code, away.json()["error"]["code"]) == (503, "no_instance")


async def test_a_scenario_without_instances_is_named_without_a_master(tmp_path: Path) -> None:
    """Schemathesis found this fault. An unknown scenario got a 503, as if a retry could help."""
    async with gateway_mesh(tmp_path) as mesh, httpx.AsyncClient() as client:
        url = f"{mesh.url}/v1/completions"
        unknown = await client.post(url, json={**BODY, "scenario": "nobodys"})
        error = unknown.json()["error"]
        assert (unknown.status_code, error["param"]) == (404, "scenario")
        assert "nobodys" in error["message"]
        assert (await client.post(url, json=BODY)).status_code == 200


class ForeseeingMaster(FakeMaster):
    """A master that names a pair of instances which the gateway does not yet know to be ready."""

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
    """The nemesis, a test with random faults, found this fault. A new prefill's record reached the
    master some milliseconds before the gateway, and a request got a 503.
    """
    async with (
        gateway_mesh(tmp_path) as mesh,
        serving(ForeseeingMaster()) as port,
        httpx.AsyncClient() as client,
    ):
        mesh.register(leader_at(port))
        response = await client.post(f"{mesh.url}/v1/completions", json=BODY)
        assert response.status_code == 200, response.text
