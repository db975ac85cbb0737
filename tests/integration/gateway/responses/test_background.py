"""Tests responses that a gateway makes in the background while no client waits. A client can find
and cancel them at any gateway.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from redis.asyncio import Redis

from pdmesh.kv.index import redis_keys as keys
from pdmesh.net.tasks import end
from pdmesh.services.gateway.http.responses import background
from pdmesh.services.gateway.http.responses.store import KeepOutcome
from pdmesh.v1.common_pb2 import ROLE_DECODE
from tests.fakes.gateway_mesh import GatewayMesh, gateway_mesh
from tests.support.sites import servers
from tests.support.waiting import until


@pytest.fixture
async def elsewhere(
    tmp_path: Path, valkey: servers.TestServer
) -> AsyncIterator[openai.AsyncOpenAI]:
    """A client of another gateway that uses the same store."""
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


async def test_a_background_response_is_found_when_it_has_ended(
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
    assert cancelled.status == "incomplete", "the response had ended"


@pytest.mark.parametrize("is_elsewhere", [False, True])
async def test_a_background_response_can_be_cancelled_at_any_gateway(
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


async def test_a_deleted_response_ends_and_does_not_come_back(
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


@pytest.fixture
async def redis(valkey: servers.TestServer) -> AsyncIterator[Any]:
    async with Redis.from_url(valkey.url) as client:
        yield client


async def begun_slowly(mesh: GatewayMesh, client: openai.AsyncOpenAI) -> str:
    slow_down(mesh)
    begun = await client.responses.create(
        model="tiny", input="hello", max_output_tokens=3000, background=True
    )
    await until(lambda: mesh.num_legs > 0)
    return begun.id


async def test_a_response_whose_gateway_is_gone_has_failed(
    mesh: GatewayMesh, client: openai.AsyncOpenAI, elsewhere: openai.AsyncOpenAI, redis: Any
) -> None:
    """A gateway marks the responses that it is making. This response has no mark any more, so
    another gateway reports it as failed.

    Like any failed response, the response can be continued by another one and can be deleted.
    """
    response_id = await begun_slowly(mesh, client)
    telling = mesh.gateway.http_app._responses.background._telling
    assert telling is not None
    await end([telling])
    await redis.ping()  # the marks that were on their way have now arrived at Redis
    await redis.delete(keys.kept_mark("default", response_id, "made"))
    response = await elsewhere.responses.retrieve(response_id)
    assert response.status == "failed"
    assert response.error is not None
    assert response.error.code == "server_error"
    cancelled = await elsewhere.responses.cancel(response_id)
    assert cancelled.status == "failed"
    after = await elsewhere.responses.create(
        model="tiny", input="more", max_output_tokens=3, previous_response_id=response_id
    )
    assert after.status == "incomplete"
    await elsewhere.responses.delete(response_id)
    with pytest.raises(openai.NotFoundError):
        await elsewhere.responses.retrieve(response_id)


async def test_a_response_whose_mark_is_late_continues(
    mesh: GatewayMesh, client: openai.AsyncOpenAI, elsewhere: openai.AsyncOpenAI, redis: Any
) -> None:
    """Marks expire during an outage of Redis. Afterwards, each gateway renews its own marks."""
    response_id = await begun_slowly(mesh, client)
    await redis.delete(keys.kept_mark("default", response_id, "made"))
    assert (await elsewhere.responses.retrieve(response_id)).status == "in_progress"
    await client.responses.cancel(response_id)


@pytest.mark.parametrize("loss", ["away", "full"])
async def test_a_response_that_ends_while_redis_accepts_nothing_is_kept_later(
    mesh: GatewayMesh,
    client: openai.AsyncOpenAI,
    valkey: servers.TestServer,
    loss: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = await client.responses.create(model="tiny", input="hello", max_output_tokens=40)
    slow_down(mesh)
    begun = await client.responses.create(
        model="tiny", input="hello", max_output_tokens=40, background=True
    )
    outcomes: list[KeepOutcome] = []
    store = mesh.gateway.http_app._responses._store
    kept_as = store._kept_as

    async def noted(tenant: str, response_id: str, record: bytes) -> KeepOutcome:
        outcomes.append(await kept_as(tenant, response_id, record))
        return outcomes[-1]

    monkeypatch.setattr(store, "_kept_as", noted)
    async with Redis.from_url(valkey.url) as redis:
        if loss == "away":
            valkey.kill()
        else:
            await redis.config_set("maxmemory", 1)
        await until(lambda: len(outcomes) > 1)
        assert set(outcomes) == {KeepOutcome(loss)}
        assert mesh.gateway.frontend.num_calls == 0, "it holds no place while it waits"
        if loss == "away":
            await valkey.start()
        else:
            assert (await client.responses.retrieve(begun.id)).status == "in_progress"
            await redis.config_set("maxmemory", 0)
    await until(lambda: outcomes[-1] is KeepOutcome.KEPT)
    response = await client.responses.retrieve(begun.id)
    assert (response.status, response.output_text) == ("incomplete", expected.output_text)


async def test_a_response_that_cannot_be_kept_in_time_has_failed(
    mesh: GatewayMesh, client: openai.AsyncOpenAI, redis: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "KEEP_WITHIN_S", 0.0)
    slow_down(mesh)
    begun = await client.responses.create(
        model="tiny", input="hello", max_output_tokens=40, background=True
    )
    await redis.config_set("maxmemory", 1)
    response = await ended(client, begun.id)
    assert (response.status, response.error.code) == ("failed", "server_error")


async def test_a_response_that_is_too_large_to_be_kept_has_failed(
    tmp_path: Path, valkey: servers.TestServer
) -> None:
    """The request fits into the limit, but the output does not."""
    async with (
        gateway_mesh(tmp_path, redis_url=valkey.url, responses_max_bytes=65536) as mesh,
        openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0) as client,
    ):
        begun = await client.responses.create(
            model="tiny", input="hello", max_output_tokens=400, background=True, user="x" * 64000
        )
        response = await ended(client, begun.id)
        assert (response.status, response.error.code) == ("failed", "response_too_large")
        assert response.output == []
        assert response.usage.output_tokens == 400
        with pytest.raises(openai.BadRequestError, match="too large") as caught:
            await client.responses.create(
                model="tiny", input="hello", background=True, user="x" * 70000
            )
        assert caught.value.param == "background"
        whole = await client.responses.create(
            model="tiny", input="hello", max_output_tokens=3, user="x" * 70000
        )
        assert whole.model_dump()["store"] is False


async def test_no_background_response_begins_while_redis_is_full(
    mesh: GatewayMesh, client: openai.AsyncOpenAI, redis: Any
) -> None:
    await redis.config_set("maxmemory", 1)
    with pytest.raises(openai.InternalServerError) as caught:
        await client.responses.create(model="tiny", input="x", background=True)
    assert caught.value.code == "response_store_full"
    await until(lambda: mesh.num_legs == 0)
    answer = await client.responses.create(model="tiny", input="x", max_output_tokens=3)
    assert (answer.status, answer.model_dump()["store"]) == ("incomplete", False)
    events: list[Any] = [
        event
        async for event in await client.responses.create(
            model="tiny", input="x", max_output_tokens=3, stream=True
        )
    ]
    assert events[-1].response.store is False


async def test_a_response_that_no_instance_can_make_has_failed(
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


async def test_only_a_response_in_the_background_can_be_cancelled(
    client: openai.AsyncOpenAI,
) -> None:
    answer = await client.responses.create(model="tiny", input="x", max_output_tokens=3)
    with pytest.raises(openai.BadRequestError):
        await client.responses.cancel(answer.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.cancel("resp_" + "0" * 24)


async def test_without_redis_a_background_response_is_refused(
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
