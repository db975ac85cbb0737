"""Connects processes to NATS and Redis over mutual TLS.

Each side must refuse strangers, and new certificates must take effect without a restart of the
connecting process.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from nats.aio.client import Client
from nats.errors import Error as NatsError

from pdmesh.embedded.servers import NatsServer
from pdmesh.errors import MeshError, Unavailable
from pdmesh.kv.index.redis_index import RedisIndex
from pdmesh.launcher.process_health import ProcessHealth
from pdmesh.net.nats.bus import NatsBus
from pdmesh.net.tasks import end
from pdmesh.net.tls.certificate_renewal import CertificateFolder
from pdmesh.net.tls.own_certificate import using_certificates
from tests.support.sites import servers
from tests.support.sites.certificates import TestAuthority
from tests.support.waiting import until

HOST = "127.0.0.1"
FILES = ("tls.key", "tls.crt")


@pytest.fixture
def ours(tmp_path: Path) -> TestAuthority:
    return TestAuthority(tmp_path / "ours")


@pytest.fixture
def theirs(tmp_path: Path) -> TestAuthority:
    return TestAuthority(tmp_path / "theirs")


@pytest.fixture
def gateway(ours: TestAuthority) -> Iterator[CertificateFolder]:
    """The certificate folder of gateway `g-0`. This process uses the certificate during the
    test.
    """
    folder = ours.folder("gateway", "g-0")
    with using_certificates(folder):
        yield folder


@pytest.fixture
async def nats(tmp_path: Path, ours: TestAuthority) -> AsyncIterator[servers.TestServer]:
    folder = ours.issue("nats", "nats", names=[HOST])
    server = servers.TestServer(NatsServer(tmp_path / "nats", tls_dir=folder), tmp_path / "nats")
    await server.start()
    yield server
    server.close()


def trust(folder: Path, *authorities: TestAuthority) -> None:
    (folder / "ca.crt").write_bytes(b"".join((a.root / "ca.crt").read_bytes() for a in authorities))


def replace(folder: Path, new: Path) -> None:
    for name in FILES:
        (folder / name).write_bytes((new / name).read_bytes())


@pytest.mark.usefixtures("gateway")
async def test_a_process_of_the_mesh_reaches_nats(nats: servers.TestServer) -> None:
    assert nats.url.startswith("tls://")
    bus = await NatsBus.connect(nats.url, "test")
    assert bus.is_connected
    await bus.close()


async def test_nats_refuses_callers_without_a_valid_certificate_of_the_mesh(
    nats: servers.TestServer, ours: TestAuthority, theirs: TestAuthority
) -> None:
    """These callers have the password, because it is in the address."""
    stranger = theirs.issue("gateway", "g-0")
    expired = ours.issue("gateway", "late", days=-1)
    assert await _reaches(nats.url, ours.issue("gateway", "g-1"))
    for folder in (stranger, expired, None):
        assert not await _reaches(nats.url, folder), folder
    client = Client()
    with pytest.raises((NatsError, OSError, TimeoutError)):
        await client.connect(
            nats.url.replace("tls:", "nats:"), allow_reconnect=False, connect_timeout=1
        )
    await client.close()


async def _reaches(url: str, folder: Path | None) -> bool:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if folder is not None:
        context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    host, _, port = url.rpartition("@")[2].rpartition(":")
    try:
        reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
        try:
            return (await reader.readline()).startswith(b"INFO ")
        finally:
            writer.close()
    except OSError:
        return False


@pytest.mark.usefixtures("gateway")
@pytest.mark.parametrize(
    ("server", "message"),
    [
        ({"names": []}, "IP address mismatch"),
        ({"names": [HOST], "days": -1}, "certificate has expired"),
        (
            {"names": [HOST], "is_strange": True},
            "certificate verify failed: (self-signed|unable to get)",
        ),
    ],
)
async def test_a_process_names_what_is_wrong_with_the_certificate_of_nats(
    tmp_path: Path,
    ours: TestAuthority,
    theirs: TestAuthority,
    server: dict[str, Any],
    message: str,
) -> None:
    authority = theirs if server.pop("is_strange", False) else ours
    folder = authority.issue("nats", "nats", **server)
    async with _listening(folder, lambda reader, writer: _silent(reader)) as port:
        with structlog.testing.capture_logs() as lines:
            connecting = asyncio.create_task(NatsBus.connect(f"tls://{HOST}:{port}", "test"))
            await until(lambda: any(line["event"] == "bus.unreachable" for line in lines))
            connecting.cancel()
            await asyncio.gather(connecting, return_exceptions=True)
    (line,) = [line for line in lines if line["event"] == "bus.unreachable"][:1]
    assert re.search(message, line["error"])


@pytest.mark.usefixtures("gateway")
async def test_a_server_without_tls_never_gets_the_password() -> None:
    """NATS clients usually read a first line in plain text, in which the server says whether it
    requires TLS.
    """
    heard: list[bytearray] = []

    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"version":"2.12.0","auth_required":true,"max_payload":1048576}\r\n')
        heard.append(of_this := bytearray())
        while data := await reader.read(4096):
            of_this.extend(data)
        writer.close()

    server = await asyncio.start_server(impostor, HOST, 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        url = f"tls://pdmesh:secret-password@{HOST}:{port}"
        connecting = asyncio.create_task(NatsBus.connect(url, "test"))
        await until(lambda: len([each for each in heard if len(each) > 100]) >= 4)
        connecting.cancel()
        await asyncio.gather(connecting, return_exceptions=True)
    for each in filter(None, heard):
        assert each[0] == 0x16  # this byte begins a TLS handshake
        assert b"secret-password" not in each
        assert b"CONNECT" not in each


class LineFirst(NatsServer):
    """A NATS server as in most clusters. It sends its first line in plain text, and then begins
    TLS.
    """

    asks_for_certificates = True

    def command(self) -> list[str]:
        command = super().command()
        config = Path(command[-1])
        text = config.read_text().replace("handshake_first: true", "")
        if not self.asks_for_certificates:
            text = text.replace("verify: true", "verify: false")
        config.write_text(text)
        return command

    async def is_ready(self) -> bool:
        try:
            reader, writer = await asyncio.open_connection(self._port.host, self._port.port)
        except OSError:
            return False
        try:
            return (await reader.readline()).startswith(b"INFO ")
        finally:
            writer.close()


@contextlib.asynccontextmanager
async def running(server: NatsServer, directory: Path) -> AsyncIterator[servers.TestServer]:
    found = servers.TestServer(server, directory)
    await found.start()
    try:
        yield found
    finally:
        found.close()


@pytest.mark.parametrize("has_certificate", [False, True])
async def test_a_server_whose_first_line_comes_before_the_handshake_is_reached(
    tmp_path: Path, ours: TestAuthority, monkeypatch: pytest.MonkeyPatch, has_certificate: bool
) -> None:
    """A process without a certificate of its own trusts the system's authorities."""
    monkeypatch.setenv("SSL_CERT_FILE", str(ours.root / "ca.crt"))
    directory = tmp_path / "nats"
    server = LineFirst(directory, tls_dir=ours.issue("nats", "nats", names=[HOST]))
    server.asks_for_certificates = has_certificate
    folder = ours.folder("gateway", "g-0") if has_certificate else None
    async with running(server, directory) as nats:
        with using_certificates(folder):
            bus = await asyncio.wait_for(NatsBus.connect(nats.url, "test"), 60)
        nats.kill()
        await until(lambda: not bus.is_connected)
        await nats.start()
        await until(lambda: bus.is_connected)
        await bus.close()


@pytest.mark.usefixtures("gateway")
async def test_a_server_may_change_to_the_handshake_first_and_back(
    tmp_path: Path, ours: TestAuthority
) -> None:
    directory = tmp_path / "nats"
    folder = ours.issue("nats", "nats", names=[HOST])
    first = LineFirst(directory, tls_dir=folder)
    port, password = first._port.port, first._password
    async with running(first, directory) as nats:
        bus = await asyncio.wait_for(NatsBus.connect(nats.url, "test"), 60)
    for kind in (NatsServer, LineFirst):
        await until(lambda: not bus.is_connected)
        other = kind(directory, port, tls_dir=folder)
        other._password = password
        async with running(other, directory):
            await until(lambda: bus.is_connected)
    await bus.close()


async def test_connections_to_nats_use_new_certificates_of_a_new_authority(
    nats: servers.TestServer,
    ours: TestAuthority,
    theirs: TestAuthority,
    gateway: CertificateFolder,
) -> None:
    of_nats = ours.root / "nats/nats"
    bus = await NatsBus.connect(nats.url, "test")
    for folder in (of_nats, gateway.path):
        trust(folder, theirs)
    replace(of_nats, theirs.issue("nats", "nats", names=[HOST]))
    replace(gateway.path, theirs.issue("gateway", "g-0"))
    assert bus.is_connected  # the open connection must stay
    nats.kill()
    await until(lambda: not bus.is_connected)
    await nats.start()
    await until(lambda: bus.is_connected)
    assert not await _reaches(nats.url, ours.issue("gateway", "g-1"))
    await bus.close()


@pytest.mark.parametrize("damage", ["expired", "another's key", "none"])
async def test_nats_is_not_killed_for_certificates_that_do_not_fit(
    tmp_path: Path, ours: TestAuthority, damage: str
) -> None:
    """The server's open connections still work. A restart would end them and would not repair the
    files.
    """
    directory, folder = tmp_path / "nats", ours.issue("nats", "nats", names=[HOST])
    server = NatsServer(directory, tls_dir=folder)
    supervisor: Any = None  # The supervisor is only for services. It has no part in this test.
    health = ProcessHealth(supervisor, {"nats": server}, lambda _: None)
    async with running(server, directory) as nats:
        assert await server.is_ready()
        if damage == "expired":
            ours.issue("nats", "nats", names=[HOST], days=-1)
        elif damage == "none":
            (folder / "tls.crt").unlink()
        else:
            (folder / "tls.key").write_bytes((ours.issue("nats", "b") / "tls.key").read_bytes())
        assert not await server.is_ready()
        await until(lambda: health._is_live("nats"), 30)
        nats.pause()
        assert not await health._is_live("nats")
        nats.resume()


# --- Redis ----------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _listening(folder: Path, serve: Any) -> AsyncIterator[int]:
    """Listen with the certificate of this folder, and require client certificates of its
    authorities. Yields the port.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=folder / "ca.crt")
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    server = await asyncio.start_server(serve, HOST, 0, ssl=context)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def _silent(reader: asyncio.StreamReader) -> None:
    await reader.read()


@contextlib.asynccontextmanager
async def tls_redis(valkey: servers.TestServer, folder: Path) -> AsyncIterator[str]:
    """Put TLS in front of Valkey, whose test build has none. All connections end when the context
    ends.
    """
    running: set[asyncio.Task[Any]] = set()

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        running.add(task)
        inner_reader, inner = await asyncio.open_unix_connection(valkey.url.removeprefix("unix://"))
        copies = [copy(reader, inner), copy(inner_reader, writer)]
        pending = {asyncio.ensure_future(each) for each in copies}
        try:
            await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end(pending)
            for each in (writer, inner):
                each.transport.abort()

    async with _listening(folder, forward) as port:
        yield f"rediss://{HOST}:{port}/0"
        await end(running)


@pytest.fixture
async def valkey(tmp_path: Path) -> AsyncIterator[servers.TestServer]:
    server = servers.valkey(tmp_path)
    await server.start()
    yield server
    server.close()


async def test_a_process_of_the_mesh_reaches_redis_and_others_do_not(
    valkey: servers.TestServer, ours: TestAuthority, theirs: TestAuthority
) -> None:
    folder = ours.issue("redis", "redis", names=[HOST])
    async with tls_redis(valkey, folder) as url:
        with using_certificates(ours.folder("kv-cache-index", "i-0")):
            own = RedisIndex(url, 20.0)
        assert await own.instance_ids() == []
        await own.close()
        others = [theirs.folder("kv-cache-index", "i-0"), None]
        for other in others:
            if other is not None:
                trust(other.path, ours)
            with using_certificates(other):
                strange = RedisIndex(url, 20.0)
            with pytest.raises(Unavailable):
                await strange.instance_ids()
            await strange.close()


async def test_a_process_names_what_is_wrong_with_the_certificate_of_redis(
    valkey: servers.TestServer, ours: TestAuthority
) -> None:
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"names": []}, "IP address mismatch"),
        ({"names": [HOST], "days": -1}, "certificate has expired"),
    )
    for options, message in cases:
        folder = ours.issue("redis", "redis", **options)
        async with tls_redis(valkey, folder) as url:
            with using_certificates(ours.folder("kv-cache-index", "i-0")):
                index = RedisIndex(url, 20.0)
            with pytest.raises(MeshError, match=message):
                await index.instance_ids()
            await index.close()


async def test_connections_to_redis_use_new_certificates_of_a_new_authority(
    valkey: servers.TestServer, ours: TestAuthority, theirs: TestAuthority
) -> None:
    folder = ours.issue("redis", "redis", names=[HOST])
    own = ours.folder("kv-cache-index", "i-0")
    async with contextlib.AsyncExitStack() as first:
        url = await first.enter_async_context(tls_redis(valkey, folder))
        with using_certificates(own):
            index = RedisIndex(url, 20.0)
        assert await index.instance_ids() == []
        port = url.rpartition(":")[2].partition("/")[0]
        await first.aclose()
        for each in (folder, own.path):
            trust(each, theirs)
        replace(folder, theirs.issue("redis", "redis", names=[HOST]))
        replace(own.path, theirs.issue("kv-cache-index", "i-0"))
        second = await first.enter_async_context(tls_redis(valkey, folder))
        pool = index._redis.connection_pool  # the new server has another port
        pool.connection_kwargs["port"] = int(second.rpartition(":")[2].partition("/")[0])
        for connection in pool._available_connections:
            assert connection.port == int(port)
            connection.port = pool.connection_kwargs["port"]

        async def answers() -> bool:
            try:
                return await index.instance_ids() == []
            except Unavailable:
                return False

        await until(answers)
        await index.close()
