"""Tests a mesh in which an engine hangs, or which loses a whole role or all instances.

Clients must get their whole texts. When no instance is left, they get the scenario's default text.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from pdmesh.atomic_file import write_atomically
from pdmesh.core.control.restart_policy import RestartPolicy
from pdmesh.core.health.node_status import parse
from pdmesh.launcher.mesh import Mesh
from pdmesh.launcher.spec import MeshSpec
from tests.support.sites import fleet
from tests.support.streams import StreamOutcome, stream_completion
from tests.support.waiting import until

PROMPT = [40 + i % 80 for i in range(130)]
MAX_TOKENS = 120


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> fleet.Reference:
    return fleet.Reference.load(tmp_path_factory.mktemp("sim-model"))


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=60) as running:
        yield running


async def ask(
    client: httpx.AsyncClient, mesh: Mesh, num_tokens: int = MAX_TOKENS, start: int = 0
) -> StreamOutcome:
    prompt = PROMPT[start:]
    return await stream_completion(client, mesh.http_url, prompt, num_tokens, ignore_eos=True)


def check(outcomes: list[StreamOutcome], reference: fleet.Reference) -> None:
    for outcome in outcomes:
        assert outcome.is_complete, (outcome.error, outcome.finish_reason, outcome.text)
        assert outcome.text == reference.text(list(outcome.prompt), MAX_TOKENS)


async def lose(mesh: Mesh, *names: str) -> None:
    """Kill the processes with SIGKILL, and do not let the supervisor start them again."""
    for name in names:
        mesh.kill(name)
    await asyncio.gather(*(mesh.supervisor.stop(name) for name in names))


async def bring_back(mesh: Mesh, *names: str) -> None:
    for name in names:
        mesh.supervisor.start(mesh.supervisor.specs[name])
    await mesh.wait_ready(names, 180)


def num_tokens(mesh: Mesh) -> float:
    return sum(
        v for n, _, v in fleet.samples(mesh, "gateway-0") if n == "pdmesh_gateway_tokens_total"
    )


def num_started(mesh: Mesh, instance_id: str) -> float:
    """How many requests the instance has accepted."""
    return sum(
        value
        for name, labels, value in fleet.samples(mesh, instance_id)
        if name == "pdmesh_admissions_total" and labels.get("pdmesh_outcome") == "accepted"
    )


@pytest.mark.req("S37", "S72")
@pytest.mark.fault("F1", "F7")
@pytest.mark.parametrize(
    ("lost", "left"),
    [(("decode-0", "decode-1"), "prefill"), (("prefill-0", "prefill-1"), "decode")],
    ids=["decodes", "prefills"],
)
async def test_when_a_whole_role_is_killed_the_other_serves_alone_until_it_is_back(
    lost: tuple[str, ...],
    left: str,
    tmp_path: Path,
    client: httpx.AsyncClient,
    reference: fleet.Reference,
) -> None:
    async with Mesh(fleet.two_by_two(), tmp_path) as mesh:
        streams = [asyncio.create_task(ask(client, mesh, start=i)) for i in range(8)]
        # Each answer then has some 25 tokens, so its prompt is not blamed for the death of an
        # instance.
        await until(lambda: num_tokens(mesh) > 8 * 25)
        await lose(mesh, *lost)
        check(await asyncio.gather(*streams), reference)
        check(await asyncio.gather(*(ask(client, mesh, start=i) for i in range(4))), reference)
        await bring_back(mesh, *lost)

        async def is_used_again() -> bool:
            check([await ask(client, mesh)], reference)
            return any(num_started(mesh, name) for name in lost)

        await until(is_used_again, within_s=60)


@pytest.mark.req("S33", "S34", "S74")
@pytest.mark.fault("F37")
async def test_an_engine_that_hangs_in_a_live_process_is_detected_and_restarted(
    tmp_path: Path, client: httpx.AsyncClient, reference: fleet.Reference
) -> None:
    """The process itself still sends heartbeats and answers probes. vLLM's host does the same while
    its engine process hangs.
    """
    hung = {
        "PDMESH_DECODE_FAILPOINT": "engine.step=hang@40",
        "PDMESH_ENGINE_SLOW_S": "2.0",
        "PDMESH_ENGINE_HUNG_S": "6.0",
    }
    async with Mesh(fleet.two_by_two({"decode-0": hung}), tmp_path) as mesh:
        pid = mesh.pid("decode-0")
        streams = [asyncio.create_task(ask(client, mesh, start=i)) for i in range(8)]
        check(await asyncio.gather(*streams), reference)
        await until(lambda: mesh.supervisor.pid("decode-0") not in (None, pid), within_s=60)
        log = mesh.log_file("decode-0").read_text()
        assert "engine.hung" in log
        await mesh.wait_ready(["decode-0"], 180)


@pytest.mark.req("S37")
async def test_if_all_instances_are_gone_clients_get_the_default_text(
    tmp_path: Path, client: httpx.AsyncClient
) -> None:
    scenarios = {"default": {"default_text": "Please come back in a minute."}}
    spec = MeshSpec(
        engine="sim",
        http_port=0,
        grpc_port=0,
        env={"PDMESH_GATEWAY_SCENARIOS": json.dumps(scenarios)},
    )
    async with Mesh(spec, tmp_path, policy=RestartPolicy(max_deaths=1)) as mesh:
        for name in ("prefill-0", "decode-0"):
            mesh.kill(name, signal.SIGKILL)

        async def has_text() -> bool:
            outcome = await ask(client, mesh)
            assert outcome.is_done or outcome.error, outcome
            return outcome.text == "Please come back in a minute."

        await until(has_text, within_s=60)


@pytest.mark.req("S33", "S34", "S74")
async def test_a_device_fault_reaches_the_instance_by_file_and_bus_and_its_level_decides(
    tmp_path: Path, client: httpx.AsyncClient, reference: fleet.Reference
) -> None:
    """The levels grade a fault by the unit to replace. At level 3, the instance must get no
    requests until the fault is over.

    At level 2, the instance must restart itself. No other instance may be affected.
    """
    spec = replace(fleet.two_by_two(), node_agent=True)
    async with Mesh(spec, tmp_path) as mesh:
        pids = {name: mesh.pid(name) for name in fleet.INSTANCES}

        async def page(name: str, path: str) -> str:
            return (await client.get(f"http://{mesh.ops_address(name)}/status/{path}")).text

        def set_level(device: str, level: int) -> None:
            said = json.dumps({"level": level, "reason": "DEVICE_RESET_REQUIRED"})
            write_atomically(tmp_path / "devices" / f"{device}.json", said)

        async def is_reported(level: int) -> bool:
            reports = json.loads(await page("health-monitor", "faults"))
            return [(r["instanceId"], r["level"]) for r in reports] == [("decode-0", level)]

        async def nothing_is_reported() -> bool:
            return await page("health-monitor", "faults") == "[]"

        set_level("decode-0", 3)
        await until(lambda: is_reported(3), within_s=60)
        assert "DEVICE_RESET_REQUIRED" in await page("node-agent", "node")
        statuses = parse((tmp_path / "run" / "node-status.json").read_text()).devices
        assert [(s.device, int(s.level)) for s in statuses] == [("decode-0", 3)]

        async def is_left_out() -> bool:
            before = num_started(mesh, "decode-0")
            check(await asyncio.gather(*(ask(client, mesh, start=i) for i in range(6))), reference)
            return num_started(mesh, "decode-0") == before

        await until(is_left_out, within_s=60)
        assert {name: mesh.pid(name) for name in pids} == pids

        set_level("decode-0", 0)
        await until(nothing_is_reported, within_s=60)
        set_level("decode-0", 2)
        await until(lambda: mesh.supervisor.pid("decode-0") not in (None, pids["decode-0"]), 60)
        set_level("decode-0", 0)
        await until(nothing_is_reported, within_s=60)
        await mesh.wait_ready(["decode-0"], 180)
        others = [name for name in pids if name != "decode-0"]
        assert [mesh.pid(name) for name in others] == [pids[name] for name in others]


@pytest.mark.req("S33", "S34")
async def test_idle_instances_are_probed_so_that_faults_are_found_before_a_request(
    tmp_path: Path, client: httpx.AsyncClient
) -> None:
    env = {
        "health-monitor": {"PDMESH_HEALTH_MONITOR_CANARY_PERIOD_S": "0.5"},
        "decode-0": {
            # No prefill answers the pulls of this decode.
            "PDMESH_DECODE_FAILPOINT": "decode.asking=drop",
            "PDMESH_TRANSFER_TIMEOUT_S": "1.0",
        },
    }
    async with Mesh(fleet.two_by_two(env), tmp_path) as mesh:

        async def reports() -> list[tuple[str, str]]:
            page = await client.get(f"http://{mesh.ops_address('health-monitor')}/status/faults")
            return [(r["instanceId"], s["reason"]) for r in page.json() for s in r["signals"]]

        async def is_found() -> bool:
            return await reports() == [("decode-0", "CANARY_FAILED")]

        await until(is_found, within_s=60)
        await until(lambda: _num_probes(mesh, "passed") > 0, within_s=60)
        assert not [s for s in fleet.samples(mesh, "gateway-0") if s[0] == "pdmesh_requests_total"]
        await mesh.supervisor.stop("health-monitor")
        await until(lambda: _nothing_held(mesh), within_s=60)


def _num_probes(mesh: Mesh, outcome: str) -> float:
    return sum(
        value
        for name, labels, value in fleet.samples(mesh, "health-monitor")
        if name == "pdmesh_canary_probes_total" and labels["pdmesh_outcome"] == outcome
    )


async def _nothing_held(mesh: Mesh) -> bool:
    return not await fleet.held(mesh)
