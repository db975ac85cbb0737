"""Runs a mesh of real processes with mutual TLS.

Every gRPC port between processes must refuse all but its own callers, and new certificates must
take effect while requests run.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import grpc
import httpx
import pytest
import pytest_asyncio
from cryptography import x509

from pdmesh.core.access.process_identity import ProcessIdentity, folder_of
from pdmesh.errors import MeshError, UntrustedPeer, WrongPeer
from pdmesh.launcher.mesh import Mesh
from pdmesh.launcher.spec import MeshSpec
from pdmesh.net.grpc import rpc
from pdmesh.net.nats.bus import NatsBus
from pdmesh.net.nats.registry import NatsRegistry
from pdmesh.net.tls.certificate_renewal import CertificateFolder
from pdmesh.net.tls.own_certificate import using_certificates
from pdmesh.v1.common_pb2 import InstanceRecord
from pdmesh.v1.instance_service_pb2 import Command, Hello, SessionRequest
from pdmesh.v1.scheduler_service_pb2 import PlanRequest
from tests.support.sites.certificates import TestAuthority
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

GROUPS: Final = """
groups:
  assigned: {scenario: assigned, prefill: 1, decode: 1}
scenarios:
  assigned: {allow_single: true}
"""
SESSION: Final = "/pdmesh.v1.InstanceService/Session"
PLAN: Final = "/pdmesh.v1.SchedulerService/Plan"
CALL_S: Final = 30.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    file = tmp_path_factory.mktemp("groups") / "groups.yaml"
    file.write_text(GROUPS)
    spec = MeshSpec(
        engine="sim",
        num_prefill=1,
        num_decode=1,
        num_blank=2,
        groups_file=file,
        http_port=0,
        grpc_port=0,
        tls=True,
    )
    async with Mesh(spec, tmp_path_factory.mktemp("mesh")) as running:
        yield running


@pytest.fixture(scope="module")
def ours(mesh: Mesh) -> TestAuthority:
    assert mesh.wiring.tls_dir is not None
    return TestAuthority(mesh.wiring.tls_dir)


async def inner_records(mesh: Mesh) -> dict[str, InstanceRecord]:
    """The records of the processes with a gRPC port for other processes. A blank instance, which
    has no role yet, opens this port when it gets a role.
    """
    found: dict[str, InstanceRecord] = {}
    with mesh.as_commands():
        bus = await NatsBus.connect(mesh.nats_url, "test")
    view = await NatsRegistry(bus, 3.0).watch()

    def are_there() -> bool:
        found.update(
            {i: r for i, r in view.records.items() if r.grpc_address and r.service != "gateway"}
        )
        return len(found) == 6

    await until(are_there)
    await view.close()
    await bus.close()
    return found


@asynccontextmanager
async def channel_with(folder: Path | None, record: InstanceRecord) -> AsyncIterator[Any]:
    with using_certificates(CertificateFolder(folder) if folder is not None else None):
        channel = rpc.channel_to(record)
    async with channel:
        yield channel


async def refusal(channel: Any, method: str = SESSION, message: bytes | None = None) -> MeshError:
    """The error with which the server refuses a call. The server must refuse a session before it
    reads a message, so `message` may be None for a session.
    """
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await _answer(channel, method, message)
    return rpc.from_rpc_error(refused.value)


async def _answer(channel: Any, method: str, message: bytes | None) -> None:
    if method != SESSION:
        await channel.unary_unary(method)(message or b"", timeout=CALL_S)
        return
    call = channel.stream_stream(method)(timeout=CALL_S)
    if message is not None:
        await call.write(message)
    await call.read()


async def complete(mesh: Mesh, client: httpx.AsyncClient) -> int:
    body = {"model": "default", "prompt": "hello", "max_tokens": 4}
    return (await client.post(f"{mesh.http_url}/v1/completions", json=body)).status_code


async def test_requests_go_from_process_to_process(mesh: Mesh) -> None:
    async with httpx.AsyncClient(timeout=60) as client:
        assert await complete(mesh, client) == 200


async def test_commands_on_this_machine_use_a_certificate_of_their_own(mesh: Mesh) -> None:
    command = [sys.executable, "-m", "pdmesh.cli.app", "--state-dir", str(mesh.state_dir)]
    shown = [
        await asyncio.to_thread(
            subprocess.run, [*command, name, "--json"], capture_output=True, text=True, timeout=120
        )
        for name in ("groups", "status")
    ]
    assert [(done.returncode, done.stderr) for done in shown] == [(0, "")] * 2
    rows = json.loads(shown[1].stdout)["rows"]
    assert len([row for row in rows if row["num_running"] is not None]) == 4


async def test_doctor_looks_at_the_certificate_of_every_port(mesh: Mesh) -> None:
    await inner_records(mesh)
    command = [sys.executable, "-m", "pdmesh.cli.app", "--state-dir", str(mesh.state_dir)]
    done = await asyncio.to_thread(
        subprocess.run,
        [*command, "doctor", "-o", "json"],
        capture_output=True,
        text=True,
        timeout=200,
    )
    found = [each for each in json.loads(done.stdout) if each["subject"] == "certificates"]
    assert [each["grade"] for each in found] == ["ok", "ok"], found
    assert "admin/local" in found[0]["text"]
    # The ports of six processes and of NATS.
    assert "7 ports show the right certificates" in found[1]["text"]


async def test_a_change_is_recorded_with_the_certificate_of_the_operator(mesh: Mesh) -> None:
    """A caller can give any name. So the history also has the name in the certificate, here that of
    `pdmesh up`, which applied the groups.
    """
    command = [sys.executable, "-m", "pdmesh.cli.app", "--state-dir", str(mesh.state_dir)]
    done = await asyncio.to_thread(
        subprocess.run,
        [*command, "history", "-o", "json"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "pdmesh up (admin/local)" in done.stdout, done.stderr


async def test_the_operators_page_works_without_a_certificate(mesh: Mesh) -> None:
    """Without an admin token, the page serves callers on this machine."""
    url = f"http://{mesh.ops_address('master-scheduler')}/admin"
    async with httpx.AsyncClient(timeout=60) as client:
        found = (await client.post(f"{url}/GetDesired", json={})).json()["desired"]
        request = {"text": found["text"] + "# the same\n", "author": "ann"}
        applied = await client.post(f"{url}/ApplyDesired", json=request)
        assert applied.status_code == 200, applied.text
        changed = (await client.post(f"{url}/GetDesired", json={})).json()["desired"]
        assert changed["author"] == "ann"


async def test_every_inner_port_refuses_strangers_and_wrong_roles_by_name(
    mesh: Mesh, ours: TestAuthority, tmp_path: Path
) -> None:
    theirs = TestAuthority(tmp_path / "theirs").issue("gateway", "gateway-0")
    stranger = tmp_path / "stranger"
    stranger.mkdir()
    for name in ("tls.crt", "tls.key", "ca.crt"):
        (stranger / name).write_bytes((theirs / name).read_bytes())
    records = await inner_records(mesh)
    assert {r.service for r in records.values()} == {
        "master-scheduler", "kv-cache-index", "prefill", "decode", "instance",
    }  # fmt: skip
    node = ours.issue("node-agent", "node-0")
    for record in records.values():
        # The two sides have different authorities and refuse each other.
        async with channel_with(stranger, record) as channel:
            error = await refusal(channel)
            assert type(error) is UntrustedPeer
            assert "certificate is not accepted" in str(error)
        for other in (stranger, ours.issue("gateway", "late", days=-1)):
            assert await _handshake_error(record, other), record
        assert await _handshake_error(record, None)
        assert not await _handshake_error(record, ours.issue("gateway", "valid"))
        async with channel_with(None, record) as channel:
            assert (await refusal(channel)).reason == "UNAVAILABLE"
        async with channel_with(node, record) as channel:
            method = PLAN if record.service == "master-scheduler" else SESSION
            if record.service == "kv-cache-index":
                method = "/pdmesh.v1.KvIndexService/Match"
            error = await refusal(channel, method)
            assert type(error) is WrongPeer
            assert "is not for node-agent/node-0" in str(error)
        moved = InstanceRecord()
        moved.CopyFrom(record)
        moved.instance_id = "another"
        async with channel_with(ours.issue("gateway", "g-1"), moved) as channel:
            error = await refusal(channel)
            assert type(error) is UntrustedPeer
            assert "names another process" in str(error)


async def _handshake_error(record: InstanceRecord, folder: Path | None) -> str:
    """The error with which the server ends the TLS handshake, or an empty text. The caller accepts
    any server.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    if folder is not None:
        context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    host, _, port = record.grpc_address.rpartition(":")
    try:
        reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
        try:
            data = await asyncio.wait_for(reader.read(1), CALL_S)  # an HTTP/2 server sends first
        finally:
            writer.close()
    except (ssl.SSLError, OSError) as exc:
        return str(exc) or type(exc).__name__
    return "" if data else "closed"


async def test_a_gateway_speaks_only_for_itself(mesh: Mesh, ours: TestAuthority) -> None:
    records = await inner_records(mesh)
    other = ours.issue("gateway", "gateway-7")
    prefill, master = records["prefill-0"], records["master-scheduler"]
    hello = Hello(gateway_id="gateway-0", instance_id="prefill-0", incarnation=prefill.incarnation)
    messages = (
        (prefill, SESSION, SessionRequest(commands=[Command(hello=hello)])),
        (master, PLAN, PlanRequest(gateway_id="gateway-0")),
    )
    for record, method, message in messages:
        async with channel_with(other, record) as channel:
            error = await refusal(channel, method, message.SerializeToString())
            assert type(error) is WrongPeer
            assert "the certificate is for gateway/gateway-7, not 'gateway-0'" in str(error)


async def test_a_process_with_the_certificate_of_another_does_not_start(
    mesh: Mesh, ours: TestAuthority, tmp_path: Path
) -> None:
    tls_dir = folder_of(ours.root, ProcessIdentity("prefill", "prefill-0"))
    environment = {
        **mesh.supervisor.specs["decode-0"].env,
        "PDMESH_DECODE_TLS_DIR": str(tls_dir),
        "PDMESH_STATE_DIR": str(tmp_path),
    }
    done = await asyncio.to_thread(
        subprocess.run,
        mesh.supervisor.specs["decode-0"].command,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert (
        f"the certificate in {tls_dir} is for prefill/prefill-0, but this process is "
        "decode/decode-0"
    ) in done.stdout + done.stderr


async def test_new_certificates_take_effect_while_requests_run_and_none_fails(
    mesh: Mesh, ours: TestAuthority
) -> None:
    records = await inner_records(mesh)
    statuses: list[int] = []
    is_over = False

    async def go_on(client: httpx.AsyncClient) -> None:
        while not is_over:
            statuses.append(await complete(mesh, client))

    async with httpx.AsyncClient(timeout=60) as client:
        clients = [asyncio.create_task(go_on(client)) for _ in range(4)]
        await until(lambda: len(statuses) >= 4)
        addresses = {name: record.grpc_address for name, record in records.items()}
        before = {name: await _serial(mesh, address) for name, address in addresses.items()}
        nats = mesh.nats_url.removeprefix("tls://")
        before_of_nats = await _serial(mesh, nats)
        for name, process in mesh.supervisor.specs.items():
            ours.issue(process.service, name, names=["127.0.0.1"])
        for name, address in addresses.items():
            assert await _serial(mesh, address) != before[name], name

        async def has_nats_read_its_own() -> bool:
            return await _serial(mesh, nats) != before_of_nats

        await until(has_nats_read_its_own)
        # Gateways must open new connections with their new certificate. Here they connect to a new
        # incarnation.
        await mesh.restart("decode-0", 120)
        num = len(statuses)
        await until(lambda: len(statuses) >= num + 8)
        is_over = True
        await asyncio.gather(*clients)
    assert set(statuses) == {200}


async def _serial(mesh: Mesh, address: str) -> int:
    """The serial number of the certificate that the port shows."""
    assert mesh.certificates is not None
    folder = mesh.certificates.path
    context = ssl.create_default_context(cafile=folder / "ca.crt")
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port), ssl=context)
    try:
        shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        return x509.load_der_x509_certificate(shown).serial_number
    finally:
        writer.close()
