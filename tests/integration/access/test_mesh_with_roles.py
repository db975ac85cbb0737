"""Runs a whole mesh in which NATS and Redis give each role its own rights. Neither server may
refuse anything that the mesh does.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import httpx

from pdmesh.launcher.mesh import Mesh
from pdmesh.launcher.spec import MeshSpec
from pdmesh.net.nats.buckets import ALL_BUCKETS
from pdmesh.net.nats.bus import NatsBus
from pdmesh.net.tls.certificate_renewal import CertificateFolder
from pdmesh.net.tls.own_certificate import using_certificates
from tests.support.waiting import until

GROUPS: Final = """
groups:
  assigned: {scenario: assigned, prefill: %d, decode: %d}
scenarios:
  assigned: {allow_single: true}
"""


def spec(directory: Path) -> MeshSpec:
    file = directory / "groups.yaml"
    file.write_text(GROUPS % (1, 1))
    return MeshSpec(
        engine="sim",
        num_prefill=1,
        num_decode=1,
        num_blank=3,
        num_masters=2,
        node_agent=True,
        groups_file=file,
        http_port=0,
        grpc_port=0,
        tls=True,
    )


async def ask(client: httpx.AsyncClient, mesh: Mesh, path: str, body: dict[str, object]) -> int:
    answer = await client.post(f"{mesh.http_url}/v1/{path}", json={"model": "default", **body})
    return answer.status_code


async def pdmesh(mesh: Mesh, *arguments: str) -> str:
    command = [sys.executable, "-m", "pdmesh.cli.app", "--state-dir", str(mesh.state_dir)]
    done = await asyncio.to_thread(
        subprocess.run, [*command, *arguments], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


async def test_a_chat_a_change_a_death_and_a_recovery_meet_no_refusal(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    kept = {"input": "hello", "max_output_tokens": 4}
    async with (
        Mesh(spec(tmp_path), tmp_path / "mesh") as mesh,
        httpx.AsyncClient(timeout=120) as client,
    ):
        assert await ask(client, mesh, "chat/completions", chat) == 200
        assert await ask(client, mesh, "responses", kept) == 200
        changed = tmp_path / "changed.yaml"
        changed.write_text(GROUPS % (1, 2))
        await pdmesh(mesh, "apply", str(changed), "--wait")
        await pdmesh(mesh, "cordon", "instance-0")
        await pdmesh(mesh, "uncordon", "instance-0")
        for name in ("decode-0", "master-scheduler", "gateway-0", "health-monitor", "nats"):
            mesh.kill(name)
            await mesh.wait_ready([name], 120)
            await mesh.wait_ready(timeout_s=120)

            async def is_served() -> bool:
                try:
                    return await ask(client, mesh, "chat/completions", chat) == 200
                except httpx.TransportError:
                    return False

            await until(is_served, 60)
        assert "instance-0" in await pdmesh(mesh, "status")
        await _an_operators_new_certificate_is_known_at_once(mesh)
        log = mesh.log_file("nats").read_text()
        redis_refusals = [
            line
            for name in ("gateway-0", "kv-cache-index")
            for line in mesh.log_file(name).read_text().splitlines()
            if re.search("NOPERM|NOAUTH|WRONGPASS|store_refused", line)
        ]
    refusals = [line for line in log.splitlines() if re.search("Violation|violation", line)]
    assert refusals == []
    assert redis_refusals == []


async def _an_operators_new_certificate_is_known_at_once(mesh: Mesh) -> None:
    await pdmesh(mesh, "certs", "operator/ann")
    assert mesh.wiring.tls_dir is not None
    accounts = mesh.state_dir / "nats" / "accounts.conf"
    await until(lambda: "operator/ann" in accounts.read_text())
    seen: list[str] = []

    async def on_event(message: object) -> None:
        seen.append(message.subject)  # type: ignore[attr-defined]

    folder = CertificateFolder(mesh.wiring.tls_dir / "operator" / "ann")
    with using_certificates(folder, nats_roles=True):
        bus = await NatsBus.connect(mesh.nats_url, "ann")
    await bus.subscribe("mesh.v1.>", on_event)
    wanted = {f"mesh.v1.health.instance.{name}" for name in ("gateway-0", "prefill-0", "decode-0")}
    await until(lambda: set(seen) >= wanted, 30)
    for name in ALL_BUCKETS:
        assert name in mesh.state_dir.joinpath("nats", "accounts.conf").read_text()
    await bus.close()
