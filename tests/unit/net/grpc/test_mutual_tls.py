"""Mutual TLS on calls between processes: who is served, who is refused, and how a refusal is named.

New certificates take effect without a restart.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import pytest

from pdmesh.core.access.process_identity import ProcessIdentity
from pdmesh.errors import UntrustedPeer, WrongPeer
from pdmesh.net.grpc import rpc
from pdmesh.net.grpc.peers import check_says
from pdmesh.net.grpc.secure_channel import SecureChannel
from pdmesh.net.tls.certificate_renewal import CertificateFolder, Certificates
from pdmesh.net.tls.own_certificate import use_certificates, using_certificates
from pdmesh.v1.common_pb2 import InstanceRecord
from pdmesh.v1.instance_service_pb2 import (
    DESCRIPTOR,
    GetKvSnapshotRequest,
    GetModelTextRequest,
    GetStatusRequest,
    InspectAdapterRequest,
    SessionRequest,
)
from pdmesh.v1.instance_service_pb2_grpc import InstanceServiceStub
from tests.support.sites.certificates import TestAuthority
from tests.support.sites.counting_servicer import CountingServicer
from tests.support.sites.refused_calls import refusal
from tests.support.waiting import until

STATUS = "/pdmesh.v1.InstanceService/GetStatus"
CALL_S = 30.0


@pytest.fixture
def ours(tmp_path: Path) -> TestAuthority:
    return TestAuthority(tmp_path / "ours")


@pytest.fixture
def theirs(tmp_path: Path) -> TestAuthority:
    return TestAuthority(tmp_path / "theirs")


@pytest.fixture(autouse=True)
def the_process_is_as_before() -> Iterator[None]:
    before = rpc.mesh_token()
    yield
    rpc.use_mesh_token(before)
    use_certificates(None)


@asynccontextmanager
async def serving(folder: CertificateFolder) -> AsyncIterator[tuple[InstanceRecord, Any]]:
    """Run a server with this certificate. While the block runs, this process uses it, too."""
    with using_certificates(folder):
        server, servicer = rpc.server(), CountingServicer()
        rpc.add_service(server, DESCRIPTOR.services_by_name["InstanceService"], servicer)
        port = rpc.listen(server, "127.0.0.1:0")
        await rpc.start(server)
        record = InstanceRecord(
            instance_id="p-0", service="prefill", grpc_address=f"127.0.0.1:{port}"
        )
        try:
            yield record, servicer
        finally:
            await server.stop(None)


def channel_of(folder: CertificateFolder | None, record: InstanceRecord) -> grpc.aio.Channel:
    with using_certificates(folder):
        return rpc.channel_to(record)


async def status(channel: grpc.aio.Channel) -> str:
    stub: Any = InstanceServiceStub(channel)  # grpc-stubs cannot type calls for asyncio
    answer = await stub.GetStatus(GetStatusRequest(), timeout=CALL_S)
    return str(answer.record.instance_id)


async def refused_status(channel: grpc.aio.Channel) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await status(channel)
    return refused.value


async def test_a_process_of_the_mesh_is_served(ours: TestAuthority) -> None:
    async with (
        serving(ours.folder("prefill", "p-0")) as (record, servicer),
        channel_of(ours.folder("operator", "o"), record) as channel,
    ):
        assert await status(channel) == "i-0"
        assert servicer.num_calls == 1


async def test_callers_without_a_valid_certificate_of_the_mesh_reach_no_handler(
    ours: TestAuthority, theirs: TestAuthority
) -> None:
    """With TLS 1.3, the caller does not learn the reason. A process that has bad files itself
    reports that.
    """
    stranger = theirs.issue("operator", "o")
    (stranger / "ca.crt").write_bytes((ours.root / "ca.crt").read_bytes())
    folders = [
        _unchecked(stranger),
        _unchecked(ours.issue("operator", "late", days=-1)),
        None,
    ]
    async with serving(ours.folder("prefill", "p-0")) as (record, servicer):
        for folder in folders:
            async with channel_of(folder, record) as channel:
                assert (await refused_status(channel)).code() is grpc.StatusCode.UNAVAILABLE
        assert servicer.num_calls == 0


def _unchecked(folder: Path) -> CertificateFolder:
    """The certificate as an attacker reads it, without the checks of `CertificateFolder`."""
    chain, key, authorities = (
        (folder / name).read_bytes() for name in ("tls.crt", "tls.key", "ca.crt")
    )
    identity = ProcessIdentity("operator", "o")
    read = Certificates(chain, key, authorities, identity, datetime.now(UTC))

    class Unchecked(CertificateFolder):
        def __init__(self) -> None: ...

        identity = read.identity

        def latest(self) -> Certificates:
            return read

    return Unchecked()


async def test_a_caller_accepts_only_the_server_that_it_means(
    ours: TestAuthority, theirs: TestAuthority
) -> None:
    expired = _unchecked(ours.issue("prefill", "p-0", days=-1))
    cases = {
        "it names another process": ours.folder("prefill", "p-1"),
        "another process": ours.folder("decode", "p-0"),
        "certificate has expired": expired,
        "certificate is not accepted": theirs.folder("prefill", "p-0"),
    }
    own = ours.folder("operator", "o")
    for message, folder in cases.items():
        async with serving(folder) as (record, servicer), channel_of(own, record) as channel:
            error = rpc.from_rpc_error(await refused_status(channel))
            assert type(error) is UntrustedPeer, message
            assert message in error.message
            assert servicer.num_calls == 0


async def test_a_role_calls_only_its_own_methods(ours: TestAuthority) -> None:
    calls = {
        "Session": lambda stub: stub.Session(iter([SessionRequest()]), timeout=CALL_S).read(),
        "GetStatus": lambda stub: stub.GetStatus(GetStatusRequest(), timeout=CALL_S),
        "GetKvSnapshot": lambda stub: stub.GetKvSnapshot(
            GetKvSnapshotRequest(), timeout=CALL_S
        ).read(),
        "GetModelText": lambda stub: stub.GetModelText(
            GetModelTextRequest(), timeout=CALL_S
        ).read(),
        "InspectAdapter": lambda stub: stub.InspectAdapter(InspectAdapterRequest(), timeout=CALL_S),
    }
    allowed = {
        "gateway": {"Session", "GetModelText"},
        "health-monitor": {"Session"},
        "master-scheduler": {"GetKvSnapshot", "InspectAdapter"},
        "kv-cache-index": {"GetKvSnapshot"},
        "operator": {"GetStatus"},
        "prefill": set(),
        "node-agent": set(),
    }
    async with serving(ours.folder("prefill", "p-0")) as (record, servicer):
        for role, methods in allowed.items():
            async with channel_of(ours.folder(role, "x"), record) as channel:
                for name, call in calls.items():
                    before = servicer.num_calls
                    called = functools.partial(call, InstanceServiceStub(channel))
                    if (refused := await refusal(called)) is not None:
                        error = rpc.from_rpc_error(refused)
                        assert type(error) is WrongPeer, (role, name, error)
                        assert f"is not for {role}/x" in error.message
                    assert (servicer.num_calls > before) == (name in methods), (role, name)


async def test_a_process_of_another_trust_domain_is_refused(
    ours: TestAuthority, tmp_path: Path
) -> None:
    """One authority may issue certificates for several meshes."""
    other = ProcessIdentity("operator", "o", "other.example.org")
    ours.authority.issue(other, tmp_path / "other", days=1)
    async with (
        serving(ours.folder("prefill", "p-0")) as (record, _),
    ):
        with using_certificates(CertificateFolder(tmp_path / "other")):
            named = rpc.channel(record.grpc_address, name="p-0.prefill.pdmesh")
        async with named as channel:
            error = rpc.from_rpc_error(await refused_status(channel))
            assert type(error) is WrongPeer
            assert "names no process of this mesh" in error.message


def test_a_caller_says_only_what_its_certificate_says() -> None:
    gateway = ProcessIdentity("gateway", "g-0")
    check_says(gateway, "g-0", "gateway_id")
    check_says(None, "anything", "gateway_id")  # without mutual TLS, any name is accepted
    with pytest.raises(WrongPeer, match="is for gateway/g-0, not 'g-1'") as refused:
        check_says(gateway, "g-1", "gateway_id")
    assert refused.value.field == "gateway_id"


async def test_new_certificates_of_a_new_authority_take_effect_while_streams_run(
    ours: TestAuthority, theirs: TestAuthority
) -> None:
    """As in any change of an authority, both sides trust both authorities for a while."""
    server, client = ours.issue("prefill", "p-0"), ours.issue("gateway", "g-0")
    folder, own = CertificateFolder(server), CertificateFolder(client)
    both = b"".join((each.root / "ca.crt").read_bytes() for each in (ours, theirs))
    async with serving(folder) as (record, _), channel_of(own, record) as channel:
        stub: Any = InstanceServiceStub(channel)
        stream = stub.Session()
        await stream.write(SessionRequest())
        await stream.read()
        for place in (server, client):
            (place / "ca.crt").write_bytes(both)
        for role, name, place in (("prefill", "p-0", server), ("gateway", "g-0", client)):
            new = theirs.issue(role, name)
            for file in ("tls.key", "tls.crt"):
                (place / file).write_bytes((new / file).read_bytes())
        text = await stub.GetModelText(GetModelTextRequest(), timeout=CALL_S).read()
        assert text.name == "config.json"
        await stream.write(SessionRequest())  # the old connection stays open
        await stream.read()
        # A process that trusts only the new authority is served. A process of the old authority is
        # refused.
        for authority, is_served in ((theirs, True), (ours, False)):
            if authority is ours:
                for place in (server, client):
                    (place / "ca.crt").write_bytes((theirs.root / "ca.crt").read_bytes())
            async with channel_of(authority.folder("operator", "o"), record) as other:
                if is_served:
                    assert await status(other) == "i-0"
                else:
                    assert (await refused_status(other)).code() is grpc.StatusCode.UNAVAILABLE
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF  # type: ignore[attr-defined]  # not in grpc-stubs


async def test_a_replaced_connection_is_closed_when_its_last_call_ends(
    ours: TestAuthority,
) -> None:
    rpc.use_mesh_token("")
    async with serving(ours.folder("prefill", "p-0")) as (record, _):
        channel = channel_of(ours.folder("gateway", "g-0"), record)
        assert isinstance(channel, SecureChannel)
        async with channel:
            stub: Any = InstanceServiceStub(channel)
            calls = []
            for _ in range(3):
                calls.append(stub.Session())
                await calls[-1].write(SessionRequest())
                await calls[-1].read()
                ours.issue("gateway", "g-0")
            channel.get_state()
            assert channel.num_replaced == 3
            for call in calls:
                call.cancel()
            await until(lambda: channel.num_replaced == 0)


async def test_without_certificates_nothing_is_encrypted_or_checked(tmp_path: Path) -> None:
    server = rpc.server()
    servicer = CountingServicer()
    rpc.add_service(server, DESCRIPTOR.services_by_name["InstanceService"], servicer)
    port = rpc.listen(server, "127.0.0.1:0")
    await rpc.start(server)
    try:
        async with rpc.channel(f"127.0.0.1:{port}") as channel:
            assert await status(channel) == "i-0"
    finally:
        await server.stop(None)
