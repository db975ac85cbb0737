"""Responses in the background: made while nobody waits, found and cancelled at any gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from redis.asyncio import Redis

from pdmesh.v1.common_pb2 import ROLE_DECODE
from tests.fakes.gateway_mesh import GatewayMesh, gateway_mesh
from tests.support.sites import servers
from tests.support.waiting import until


@pytest.fixture
async def elsewhere(
    tmp_path: Path, valkey: servers.TestServer
) -> AsyncIterator[openai.AsyncOpenAI]:
    """A client of another gateway beside the same store."""
    async with (
        gateway_mesh(tmp_path / "other", redis_url=valkey.url) as other,
        openai.AsyncOpenAI(base_url=f"{other.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def slow_down(mesh: GatewayMesh) -> None:
    for instance in mesh.instances.values():
        if instance.role == ROLE_DECODE:
            instance.step_s = 0.05


async def ended(client: openai.AsyncOpenAI, response_id: str) -> Any:
    found: list[Any] = []

    async def is_over() -> bool:
        found[:] = [await client.responses.retrieve(response_id)]
        return bool(found[0].status != "in_progress")

    await until(is_over)
    return found[0]


async def test_it_is_found_when_it_has_ended(
    mesh: GatewayMesh, client: openai.AsyncOpenAI, elsewhere: openai.AsyncOpenAI
) -> None:
    expected = await client.responses.create(model="tiny", input="hello", max_output_tokens=12)
    begun = await client.responses.create(
        model="tiny", input="hello", max_output_tokens=12, background=True
    )
    assert (begun.status, begun.background, begun.output) == ("in_progress", True, [])
    response = await ended(elsewhere, begun.id)
    assert (response.status, response.background) == ("incomplete", True)
    assert response.output_text == expected.output_text
    assert response.usage.output_tokens == 12
    after = await elsewhere.responses.create(
        model="tiny", input="more", max_output_tokens=3, previous_response_id=begun.id
    )
    assert after.usage is not None
    assert after.usage.input_tokens > response.usage.total_tokens
    cancelled = await client.responses.cancel(begun.id)
    assert cancelled.status == "incomplete", "it had ended"


@pytest.mark.parametrize("is_elsewhere", [False, True])
async def test_it_can_be_cancelled_at_any_gateway(
    mesh: GatewayMesh,
    client: openai.AsyncOpenAI,
    elsewhere: openai.AsyncOpenAI,
    is_elsewhere: bool,
) -> None:
    slow_down(mesh)
    begun = await client.responses.create(
        model="tiny", input="hello", max_output_tokens=3000, background=True
    )
    await until(lambda: mesh.num_legs > 0)
    assert (await elsewhere.responses.retrieve(begun.id)).status == "in_progress"
    with pytest.raises(openai.BadRequestError, match="still being made") as caught:
        await client.responses.create(model="tiny", input="more", previous_response_id=begun.id)
    assert caught.value.param == "previous_response_id"
    cancelled = await (elsewhere if is_elsewhere else client).responses.cancel(begun.id)
    assert cancelled.status == "cancelled"
    await until(lambda: mesh.num_legs == 0)
    assert (await client.responses.retrieve(begun.id)).status == "cancelled"


async def test_one_that_is_deleted_ends_and_does_not_come_back(
    mesh: GatewayMesh, client: openai.AsyncOpenAI
) -> None:
    slow_down(mesh)
    begun = await client.responses.create(
        model="tiny", input="hello", max_output_tokens=3000, background=True
    )
    await until(lambda: mesh.num_legs > 0)
    await client.responses.delete(begun.id)
    await until(lambda: mesh.num_legs == 0)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(begun.id)


async def test_one_whose_gateway_is_gone_has_failed(
    mesh: GatewayMesh,
    client: openai.AsyncOpenAI,
    elsewhere: openai.AsyncOpenAI,
    valkey: servers.TestServer,
) -> None:
    """The gateway says for some seconds that it makes a response; here nobody does."""
    slow_down(mesh)
    begun = await client.responses.create(
        model="tiny", input="hello", max_output_tokens=3000, background=True
    )
    telling = mesh.gateway.http_app._responses.background._telling
    assert telling is not None
    telling.cancel()
    redis = Redis.from_url(valkey.url)
    await redis.delete(f"pdmesh:v1:response:{{default}}:{begun.id}:made")
    await redis.aclose()
    response = await elsewhere.responses.retrieve(begun.id)
    assert response.status == "failed"
    assert response.error is not None
    assert response.error.code == "server_error"


async def test_one_that_no_instance_can_make_has_failed(
    mesh: GatewayMesh, client: openai.AsyncOpenAI
) -> None:
    slow_down(mesh)
    begun = await client.responses.create(
        model="tiny", input="hello", max_output_tokens=3000, background=True
    )
    await until(lambda: mesh.num_legs > 0)
    mesh.gateway.frontend.is_draining = True
    await mesh.gateway.frontend.drain(0.01)
    mesh.gateway.frontend.is_draining = False
    response = await ended(client, begun.id)
    assert (response.status, response.error.code) == ("failed", "draining")


async def test_only_what_is_in_the_background_can_be_cancelled(client: openai.AsyncOpenAI) -> None:
    answer = await client.responses.create(model="tiny", input="x", max_output_tokens=3)
    with pytest.raises(openai.BadRequestError):
        await client.responses.cancel(answer.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.cancel("resp_" + "0" * 24)


async def test_without_redis_it_is_refused(
    mesh: GatewayMesh, client: openai.AsyncOpenAI, valkey: servers.TestServer
) -> None:
    valkey.kill()
    with pytest.raises(openai.InternalServerError) as caught:
        await client.responses.create(model="tiny", input="x", background=True)
    assert caught.value.code == "unavailable"
    await until(lambda: mesh.num_legs == 0)
    assert mesh.gateway.frontend.num_calls == 0
    for wrong, field in (({"store": False}, "background"), ({"stream": True}, "stream")):
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(
                model="tiny", input="x", background=True, extra_body=wrong
            )
        assert refused.value.param == field
