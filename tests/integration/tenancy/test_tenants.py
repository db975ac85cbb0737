"""Tests API keys and tenants' limits over HTTP and gRPC, and that tenants share no KV."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from pdmesh import api_keys
from pdmesh.api_keys import KeyFile
from pdmesh.core.tenancy.tenant import TenantEntry
from pdmesh.net.grpc import rpc
from pdmesh.service_process import StartupError
from pdmesh.services.gateway.access.access_control import KeyedAccess, OpenAccess, access_control
from pdmesh.v1 import inference_service_pb2 as pb
from pdmesh.v1.common_pb2 import ROLE_DECODE
from pdmesh.v1.inference_service_pb2_grpc import InferenceServiceStub
from tests.fakes.gateway_mesh import GatewayMesh, gateway_mesh
from tests.support.waiting import until

BODY = {"model": "tiny", "prompt": "abc", "max_tokens": 4}


@dataclass
class Keyed:
    mesh: GatewayMesh
    client: httpx.AsyncClient
    file: KeyFile
    path: Path
    tokens: dict[str, str]

    async def ask(self, tenant: str, **fields: Any) -> httpx.Response:
        return await self.client.post(
            "/v1/completions", json={**BODY, **fields}, headers=self.headers(tenant)
        )

    def headers(self, tenant: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self.tokens[tenant]}"}


@asynccontextmanager
async def keyed(directory: Path, **tenants: TenantEntry) -> AsyncIterator[Keyed]:
    path, file = directory / "keys.json", KeyFile(tenants=dict(tenants))
    tokens = {name: api_keys.issue(file, name) for name in tenants}
    api_keys.save(path, file)
    access = KeyedAccess(path)
    async with (
        gateway_mesh(directory, access=access) as mesh,
        httpx.AsyncClient(base_url=mesh.url) as client,
    ):
        yield Keyed(mesh, client, file, path, tokens)


@pytest.mark.fault("F39")
@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer nope", "Basic eDp5"])
async def test_without_a_valid_key_nothing_is_read_or_revealed(
    tmp_path: Path, header: str | None
) -> None:
    async with keyed(tmp_path, acme=TenantEntry()) as k:
        headers = {} if header is None else {"authorization": header}
        for method, path in (
            ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("GET", "/v1/models"),
            ("GET", "/v1/models/tiny"), ("POST", "/tokenize"),
            ("POST", "/detokenize"),
        ):  # fmt: skip
            response = await k.client.request(method, path, headers=headers, content=b"{")
            assert response.status_code == 401, path
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert response.json()["error"]["type"] == "authentication_error"
            assert response.headers["www-authenticate"] == "Bearer"
        assert (await k.client.get("/health/live")).status_code == 200


@pytest.mark.fault("F39")
async def test_a_key_may_be_in_the_header_of_anthropic_clients(tmp_path: Path) -> None:
    async with keyed(tmp_path, acme=TenantEntry()) as k:
        (authorization,) = k.headers("acme").values()
        key = authorization.removeprefix("Bearer ")
        body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
        for headers, status in (
            ({"x-api-key": key}, 200), ({"authorization": authorization}, 200),
            ({"x-api-key": "nope"}, 401), ({}, 401),
            ({"x-api-key": key, "authorization": "Bearer nope"}, 401),
        ):  # fmt: skip
            answer = await k.client.post("/v1/messages", json=body, headers=headers)
            assert answer.status_code == status
            if status == 401:
                assert answer.json()["error"]["type"] == "authentication_error"


@pytest.mark.fault("F39")
async def test_over_grpc_nothing_but_health_answers_without_a_key(tmp_path: Path) -> None:
    async with (
        keyed(tmp_path, acme=TenantEntry()) as k,
        rpc.channel(f"127.0.0.1:{k.mesh.gateway.grpc.port}") as channel,
    ):

        async def described(metadata: tuple[tuple[str, str], ...] = ()) -> list[Any]:
            asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
            stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
            return [r async for r in stub.ServerReflectionInfo(asked, metadata=metadata)]

        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await described()
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        token = k.tokens["acme"]
        (found,) = await described((("authorization", f"Bearer {token}"),))
        assert len(found.list_services_response.service) == 3
        health = health_pb2_grpc.HealthStub(channel)
        await health.Check(health_pb2.HealthCheckRequest())


async def test_the_openai_client_works_with_its_key_and_says_so_without(tmp_path: Path) -> None:
    async with keyed(tmp_path, acme=TenantEntry()) as k:
        url = f"{k.mesh.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=k.tokens["acme"]) as client:
            answer = await client.completions.create(model="tiny", prompt="abc", max_tokens=9)
            assert answer.choices[0].text == k.mesh.expected_text("abc", 9)
        async with openai.AsyncOpenAI(base_url=url, api_key="wrong") as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()


async def test_requests_over_the_rate_get_429_and_succeed_after_retry_after(tmp_path: Path) -> None:
    async with keyed(tmp_path, acme=TenantEntry(requests_per_s=3), beta=TenantEntry()) as k:
        answers = await asyncio.gather(*(k.ask("acme") for _ in range(20)))
        statuses = [a.status_code for a in answers]
        assert statuses.count(200) >= 3
        assert 429 in statuses
        refused = next(a for a in answers if a.status_code == 429)
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert refused.headers["retry-after"] == "1"
        assert (await k.ask("beta")).status_code == 200, "another tenant's limits are its own"

        async def is_served() -> bool:
            return (await k.ask("acme")).status_code == 200

        await until(is_served)


async def test_open_requests_are_bounded_and_a_closed_one_makes_room(tmp_path: Path) -> None:
    async with keyed(tmp_path, acme=TenantEntry(max_concurrent=2)) as k:
        for instance in k.mesh.instances.values():
            instance.is_holding = instance.role == ROLE_DECODE
        asks = [asyncio.create_task(k.ask("acme")) for _ in range(2)]
        await until(lambda: k.mesh.gateway.frontend.num_calls == 2)
        refused = await k.ask("acme")
        assert refused.json()["error"]["code"] == "concurrency_limit_exceeded"
        for ask in asks:
            ask.cancel()
        await asyncio.gather(*asks, return_exceptions=True)
        await until(lambda: k.mesh.gateway.frontend.num_calls == 0)
        for instance in k.mesh.instances.values():
            instance.is_holding = False
        assert (await k.ask("acme")).status_code == 200


async def test_tokens_are_charged_in_advance_and_unused_ones_are_refunded(tmp_path: Path) -> None:
    async with keyed(tmp_path, acme=TenantEntry(tokens_per_min=100, tokens_per_day=120)) as k:
        stop = k.mesh.expected_text("abc", 4)[2]
        for _ in range(3):  # each call pays 83 tokens in advance, but only 6 in the end
            answer = await k.ask("acme", max_tokens=80, stop=stop)
            assert answer.status_code == 200
        too_many = await k.ask("acme", max_tokens=97)
        assert too_many.json()["error"]["code"] == "token_rate_limit_exceeded"
        assert 1 <= int(too_many.headers["retry-after"]) <= 12
        over = await k.ask("acme", max_tokens=118)
        assert over.json()["error"]["code"] == "insufficient_quota"


async def test_tokenizing_counts_as_tokens(tmp_path: Path) -> None:
    async with keyed(tmp_path, acme=TenantEntry(tokens_per_day=100)) as k:

        async def ask(num_tokens: int) -> httpx.Response:
            body = {"model": "tiny", "prompt": "x" * num_tokens}
            return await k.client.post("/tokenize", json=body, headers=k.headers("acme"))

        assert (await ask(60)).json()["count"] == 60
        assert (await ask(60)).json()["error"]["code"] == "insufficient_quota"
        assert (await ask(40)).status_code == 200
        assert (await k.ask("acme")).status_code == 429, "they are the same tokens"


@pytest.mark.fault("F39")
async def test_a_key_is_valid_only_for_its_models(tmp_path: Path) -> None:
    async with keyed(
        tmp_path, acme=TenantEntry(models=["other"]), off=TenantEntry(is_disabled=True)
    ) as k:
        refused = await k.ask("acme")
        assert refused.status_code == 403
        assert refused.json()["error"]["param"] == "model"
        listed = await k.client.get("/v1/models", headers=k.headers("acme"))
        assert listed.json()["data"] == []
        assert (await k.ask("off")).status_code == 403


@pytest.mark.fault("F39")
async def test_revoking_a_key_ends_it_without_a_restart(tmp_path: Path) -> None:
    async with keyed(tmp_path, acme=TenantEntry(), beta=TenantEntry()) as k:
        api_keys.revoke(k.file, k.tokens["acme"].split("_")[1])
        api_keys.save(k.path, k.file)

        async def is_refused() -> bool:
            return (await k.ask("acme")).status_code == 401

        await until(is_refused)
        k.path.write_text("{ not a key file")
        await asyncio.sleep(1.5)  # long enough for the gateway to notice the broken file
        assert (await k.ask("beta")).status_code == 200, "a broken key file locks no client out"


@pytest.mark.req("S80")
async def test_equal_prompts_of_two_tenants_have_no_block_name_in_common(tmp_path: Path) -> None:
    async with keyed(tmp_path, acme=TenantEntry(), beta=TenantEntry()) as k:
        prompt = "x" * 64
        for tenant in ("acme", "beta", "acme"):
            assert (await k.ask(tenant, prompt=prompt)).status_code == 200
        first, second, third = k.mesh.instances["prefill-0"].prefills
        assert len(first.block_hashes) == 4
        assert first.block_hashes == third.block_hashes
        assert not set(first.block_hashes) & set(second.block_hashes)
        assert first.cache_salt != second.cache_salt


@pytest.mark.fault("F39")
async def test_grpc_asks_for_the_same_key_and_keeps_the_same_limits(tmp_path: Path) -> None:
    async with (
        keyed(tmp_path, acme=TenantEntry(requests_per_s=2)) as k,
        rpc.channel(f"127.0.0.1:{k.mesh.gateway.grpc.port}") as channel,
    ):
        stub = InferenceServiceStub(channel)
        request = pb.GenerateRequest(text="abc", params=pb.GenerationParams(max_tokens=4))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(request)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        metadata = (("authorization", f"Bearer {k.tokens['acme']}"),)
        answer = await stub.Generate(request, metadata=metadata)
        assert answer.text == k.mesh.expected_text("abc", 4)
        stream = stub.GenerateStream(pb.GenerateStreamRequest(request=request), metadata=metadata)
        assert "".join([p.text async for p in stream]) == answer.text
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            # All calls come at once. One by one, they might stay within the rate on a slow machine.
            await asyncio.gather(*(stub.Generate(request, metadata=metadata) for _ in range(20)))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        error = rpc.from_rpc_error(caught.value)
        assert error.reason == "RATE_LIMIT_EXCEEDED"
        assert error.retry_after_ms is not None
        assert 0 < error.retry_after_ms <= 500


@pytest.mark.fault("F39")
def test_a_reachable_address_needs_keys_or_an_explicit_setting(tmp_path: Path) -> None:
    for host in ("127.0.0.1", "::1", "localhost", "127.8.8.8"):
        assert isinstance(access_control(host, None, allow_anonymous=False), OpenAccess)
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org", ""):
        with pytest.raises(StartupError, match="PDMESH_GATEWAY_KEYS_FILE"):
            access_control(host, None, allow_anonymous=False)
        assert isinstance(access_control(host, None, allow_anonymous=True), OpenAccess)
    with pytest.raises(StartupError, match="cannot read"):
        access_control("127.0.0.1", tmp_path / "none.json", allow_anonymous=True)
