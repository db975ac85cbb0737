"""Tests how many tokens a tenant pays for a call that fails. The tenant pays for the tokens that
its client got, and pays nothing if the client got only an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import httpx
import pytest

from pdmesh.core.tenancy.limits import ANYONE
from pdmesh.net.grpc import rpc
from pdmesh.services.gateway.access.access_control import OpenAccess
from pdmesh.v1 import inference_service_pb2 as pb
from pdmesh.v1.inference_service_pb2_grpc import InferenceServiceStub
from tests.fakes.fake_instance import FakeInstance
from tests.fakes.gateway_mesh import GatewayMesh, gateway_mesh
from tests.support.waiting import until

pytestmark = [pytest.mark.req("S44"), pytest.mark.fault("F7")]

BODY = {"model": "tiny", "prompt": "abc", "max_tokens": 4000}
NUM_DRAWN = 30  # each choice draws more tokens than this before the only instance dies


class Ledger(OpenAccess):
    """An access control that admits every call. It records how many tokens each call is charged at
    its end.
    """

    def __init__(self) -> None:
        self.settled: list[int] = []
        self.tenant = ANYONE

    async def enter(self, authorization: str) -> Ledger:
        return self

    def charge(self, num_tokens: int) -> None: ...

    async def has_more(self) -> bool:
        return False

    def settle(self, num_used: int) -> None:
        self.settled.append(num_used)

    def leave(self) -> None: ...


@contextlib.asynccontextmanager
async def one_fusion(
    directory: Path, ledger: Ledger
) -> AsyncIterator[tuple[GatewayMesh, FakeInstance]]:
    """A mesh with one fusion instance, which does prefill and decode, and without retries. The
    gateway sends the first chunk of a stream at once. It sends the next chunk only after a long
    time, so all other tokens come in the last chunk.
    """
    async with gateway_mesh(
        directory, 0, 0, num_fusions=1, access=ledger, max_migrations=0, chunk_interval_ms=600_000.0
    ) as mesh:
        fusion = mesh.instances["fusion-0"]
        fusion.step_s = 0.001
        yield mesh, fusion


async def die_in_the_middle(fusion: FakeInstance, num_choices: int = 1) -> None:
    def have_drawn() -> bool:
        legs = list(fusion.legs.values())
        return len(legs) == num_choices and all(len(leg.tokens) > NUM_DRAWN + 3 for leg in legs)

    await until(have_drawn)
    fusion.break_sessions()


@pytest.mark.parametrize("num_choices", [1, 2])
async def test_a_stream_that_fails_gives_every_token_that_is_charged(
    tmp_path: Path, num_choices: int
) -> None:
    ledger = Ledger()
    async with (
        one_fusion(tmp_path, ledger) as (mesh, fusion),
        httpx.AsyncClient() as client,
        client.stream(
            "POST", f"{mesh.url}/v1/completions", json={**BODY, "stream": True, "n": num_choices}
        ) as response,
    ):
        dying = asyncio.create_task(die_in_the_middle(fusion, num_choices))
        events = [
            json.loads(line.removeprefix("data: "))
            async for line in response.aiter_lines()
            if line.startswith("data: {")
        ]
        await dying
        assert events[-1]["error"]["code"] == "upstream_failed"
        texts = [""] * num_choices
        for event in events[:-1]:
            for choice in event["choices"]:
                texts[choice["index"]] += choice["text"]
        await until(lambda: bool(ledger.settled))
        num_prompt_tokens = len(mesh.tokenizer._encode("abc", add_special_tokens=True))
        assert ledger.settled == [num_prompt_tokens + sum(map(len, texts))], (
            "each letter is one token"
        )
        assert all(len(text) >= NUM_DRAWN for text in texts)
        assert {mesh.expected_text("abc", len(text)) == text for text in texts} == {True}


async def test_an_answer_that_fails_whole_is_charged_nothing(tmp_path: Path) -> None:
    ledger = Ledger()
    async with one_fusion(tmp_path, ledger) as (mesh, fusion), httpx.AsyncClient() as client:
        asking = asyncio.create_task(client.post(f"{mesh.url}/v1/completions", json=BODY))
        await die_in_the_middle(fusion)
        assert (await asking).status_code == 503
        await until(lambda: bool(ledger.settled))
        assert ledger.settled == [0]


async def test_failed_grpc_streams_are_charged_for_their_output_and_whole_answers_are_not(
    tmp_path: Path,
) -> None:
    ledger = Ledger()
    async with (
        one_fusion(tmp_path, ledger) as (mesh, fusion),
        rpc.channel(f"127.0.0.1:{mesh.gateway.grpc.port}") as channel,
    ):
        stub = InferenceServiceStub(channel)
        params = pb.GenerationParams(max_tokens=4000)
        request = pb.GenerateRequest(model="tiny", text="abc", params=params)
        text = ""

        async def read() -> None:
            nonlocal text
            async for response in stub.GenerateStream(pb.GenerateStreamRequest(request=request)):
                text += response.text

        dying = asyncio.create_task(die_in_the_middle(fusion))
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await read()
        await dying
        assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
        await until(lambda: bool(ledger.settled))
        num_prompt_tokens = len(mesh.tokenizer._encode("abc", add_special_tokens=True))
        assert ledger.settled == [num_prompt_tokens + len(text)]
        assert text == mesh.expected_text("abc", len(text))
        assert len(text) >= NUM_DRAWN
        ledger.settled.clear()
        dying = asyncio.create_task(die_in_the_middle(fusion))
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.Generate(request)
        await dying
        await until(lambda: bool(ledger.settled))
        assert ledger.settled == [0]
