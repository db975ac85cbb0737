"""Runs two gateway processes on one port. One is asked to stop, or killed, while all its streams
run.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from pdmesh import api_keys
from pdmesh.api_keys import KeyFile
from pdmesh.core.tenancy.tenant import TenantEntry
from pdmesh.launcher.mesh import Mesh
from pdmesh.launcher.spec import MeshSpec
from tests.support.sites import fleet
from tests.support.streams import StreamOutcome, stream_completion
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_STREAMS, NUM_TOKENS = 24, 120
GATEWAYS = ("gateway-0", "gateway-1")


@pytest.fixture(scope="module")
def token(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    file = KeyFile(tenants={"acme": TenantEntry(max_concurrent=400)})
    issued = api_keys.issue(file, "acme")
    api_keys.save(path, file)
    return issued, path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(
    tmp_path_factory: pytest.TempPathFactory, token: tuple[str, Path]
) -> AsyncIterator[Mesh]:
    spec = MeshSpec(
        engine="sim",
        num_prefill=1,
        num_decode=1,
        num_gateways=2,
        http_port=0,
        grpc_port=0,
        host="0.0.0.0",
        keys_file=token[1],
        start_timeout_s=180,
        env={"PDMESH_PREFILL_NUM_SLOTS": "48", "PDMESH_DECODE_NUM_SLOTS": "48"},
    )
    async with Mesh(spec, tmp_path_factory.mktemp("mesh")) as running:
        yield running


@asynccontextmanager
async def many_streams(
    mesh: Mesh, url: str, key: str
) -> AsyncIterator[
    tuple[httpx.AsyncClient, list[list[int]], list[asyncio.Task[StreamOutcome]], str]
]:
    """Start the streams. Yields the client, the prompts, their running streams, and the gateway
    with the most streams.
    """
    headers = {"authorization": f"Bearer {key}"}
    # Each request has a connection of its own, so the kernel spreads the requests over the
    # gateways.
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=30, headers=headers, limits=limits) as client:
        prompts = [[40 + (i * 7 + j) % 80 for j in range(20)] for i in range(NUM_STREAMS)]
        streams = [
            asyncio.create_task(stream_completion(client, url, p, NUM_TOKENS, ignore_eos=True))
            for p in prompts
        ]
        await until(lambda: sum(num_calls(mesh, g) for g in GATEWAYS) == NUM_STREAMS, within_s=60)
        yield client, prompts, streams, max(GATEWAYS, key=lambda g: num_calls(mesh, g))


def num_calls(mesh: Mesh, process: str) -> float:
    return next(v for n, _, v in fleet.samples(mesh, process) if "requests_in_flight" in n)


@pytest.mark.fault("F10")
@pytest.mark.req("S74")
async def test_after_sigterm_streams_end_normally_and_the_other_gateway_takes_new_requests(
    mesh: Mesh, token: tuple[str, Path], tmp_path: Path
) -> None:
    reference = fleet.Reference.load(tmp_path / "sim-model")
    url = mesh.http_url.replace("0.0.0.0", "127.0.0.1")
    async with many_streams(mesh, url, token[0]) as (client, prompts, streams, victim):
        num_on_victim = num_calls(mesh, victim)
        assert num_on_victim > 0
        os.kill(mesh.pid(victim) or 0, signal.SIGTERM)
        late_ones = []
        while not all(s.done() for s in streams):
            late = await stream_completion(client, url, prompts[0], 2, ignore_eos=True)
            late_ones.append(late)
            await asyncio.sleep(0.05)
        # The kernel may have given a connection to the gateway that stops. Then the connection is
        # reset, or its request is refused as `draining`.
        unlucky = [o for o in late_ones if not o.is_complete]
        assert all(o.was_cut or (o.error or {})["code"] == "draining" for o in unlucky)
        assert len(unlucky) <= 2
        assert any(o.is_complete for o in late_ones)
        outcomes = [s.result() for s in streams]
        assert [o.fault_in_ending() for o in outcomes if not o.is_complete] == []
        texts = [reference.text(p, NUM_TOKENS) for p in prompts]
        assert [o.text for o in outcomes] == texts
        print(
            f"{num_on_victim:.0f} of {NUM_STREAMS} streams ended on the gateway that was stopped;"
            f" {len(unlucky)} of {len(late_ones)} later requests had to be repeated"
        )
        after = await stream_completion(client, url, prompts[0], 2, ignore_eos=True)
        assert after.is_complete
        refused = await client.get(f"{url}/v1/models", headers={"authorization": "Bearer x"})
        assert refused.status_code == 401


@pytest.mark.fault("F9")
@pytest.mark.req("S39")
async def test_a_killed_gateway_takes_its_own_streams_with_it_and_no_other(
    mesh: Mesh, token: tuple[str, Path], tmp_path: Path
) -> None:
    """The connections of the killed gateway's clients end. Clients of the other gateway notice
    nothing. Instances free everything that they held for the killed gateway, and serve new
    requests.
    """
    reference = fleet.Reference.load(tmp_path / "sim-model")
    url = mesh.http_url.replace("0.0.0.0", "127.0.0.1")
    await mesh.wait_ready(timeout_s=180)
    await until(lambda: all(is_up(mesh, g) for g in GATEWAYS), within_s=60)
    async with many_streams(mesh, url, token[0]) as (client, prompts, streams, victim):
        num_on_victim = num_calls(mesh, victim)
        os.kill(mesh.pid(victim) or 0, signal.SIGKILL)
        late_ones = [
            await stream_completion(client, url, prompts[0], 2, ignore_eos=True) for _ in range(10)
        ]
        assert all(o.is_complete or o.was_cut for o in late_ones)
        assert sum(o.is_complete for o in late_ones) >= 8
        outcomes = await asyncio.gather(*streams)
        assert [o.fault_in_ending() for o in outcomes if o.fault_in_ending()] == []
        for prompt, outcome in zip(prompts, outcomes, strict=True):
            text = reference.text(prompt, NUM_TOKENS)
            assert outcome.text == text if outcome.is_complete else text.startswith(outcome.text)
        assert sum(o.was_cut for o in outcomes) == num_on_victim
        freed_s = await until(lambda: not slots_used(mesh))
        back_s = await until(lambda: is_up(mesh, victim))
        print(
            f"{num_on_victim:.0f} streams cut, free {freed_s:.1f} s and back {back_s:.1f} s later"
        )


def slots_used(mesh: Mesh) -> float:
    names = ("prefill-0", "decode-0")
    return sum(v for p in names for n, _, v in fleet.samples(mesh, p) if n == "pdmesh_slots_used")


def is_up(mesh: Mesh, process: str) -> bool:
    try:
        return num_calls(mesh, process) >= 0
    except (OSError, StopIteration):
        return False
