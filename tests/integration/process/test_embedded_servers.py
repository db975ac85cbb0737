"""Starts the NATS and Redis servers that the launcher runs itself, and tests them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import nats
import pytest
from nats.aio.client import Client
from nats.errors import Error as NatsError

from loadtests.harness.server import running
from pdmesh.embedded import binaries, child
from pdmesh.embedded.ports import PortReservation, PortTaken
from pdmesh.embedded.servers import NatsServer, Server, ValkeyServer
from tests.support.sites.processes import is_alive
from tests.support.waiting import until


def make_server(kind: str, directory: Path) -> Server:
    return NatsServer(directory) if kind == "nats" else ValkeyServer(directory)


@pytest.mark.parametrize("kind", ["nats", "valkey"])
async def test_a_server_starts_in_its_private_directory_and_stops(
    kind: str, tmp_path: Path
) -> None:
    server = make_server(kind, tmp_path / kind)
    async with running(server, tmp_path / "log") as url:
        assert url.startswith(("nats://pdmesh:", "unix:///"))
        assert await server.is_ready()
    assert not await server.is_ready()
    assert (tmp_path / kind).stat().st_mode & 0o777 == 0o700


async def test_nats_admits_only_users_who_can_read_its_file(tmp_path: Path) -> None:
    """A stranger with an account on the machine must not get in, because anybody who writes to the
    buckets controls the mesh.
    """
    server = NatsServer(tmp_path / "nats")
    command = server.command()
    async with running(server, tmp_path / "log") as url:
        password = url.partition("://pdmesh:")[2].partition("@")[0]
        address = url.rpartition("@")[2]
        for stranger in (address, f"pdmesh:{password[:-1]}@{address}", f"pdmesh@{address}"):
            client = Client()
            with pytest.raises(NatsError, match="Authorization Violation"):
                await client.connect(f"nats://{stranger}", allow_reconnect=False)
            await client.close()
        client = await nats.connect(url, allow_reconnect=False)
        await client.close()
    config = Path(command[-1])
    assert password in config.read_text()
    assert config.stat().st_mode & 0o777 == 0o600
    assert password not in " ".join(command)


@pytest.mark.parametrize("kind", ["nats", "valkey"])
@pytest.mark.fault("F18")
async def test_a_killed_server_comes_back_at_the_same_address(kind: str, tmp_path: Path) -> None:
    server = make_server(kind, tmp_path / kind)
    url = server.url
    first = child.start(server.command(), os.environ, tmp_path / "log")
    try:
        await until(server.is_ready)
    finally:
        first.kill()
        first.wait()
    assert not await server.is_ready()
    second = child.start(server.command(), os.environ, tmp_path / "log")
    try:
        await until(server.is_ready)
        assert server.url == url
    finally:
        second.kill()
        second.wait()
        server.close()


def test_the_unix_socket_is_closed_to_others_even_when_its_directory_is_too_deep(
    tmp_path: Path,
) -> None:
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    server = ValkeyServer(deep)
    server.command()
    path = Path(server.url.removeprefix("unix://"))
    assert len(str(path)) < 100
    assert path.parent.stat().st_mode & 0o777 == 0o700
    path.parent.rmdir()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
@pytest.mark.req("S74")
async def test_a_killed_parent_takes_its_child_with_it(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            textwrap.dedent(f"""
            import os, time
            from pathlib import Path
            from pdmesh.embedded import child
            log = Path({str(tmp_path / "log")!r})
            print(child.start(["sleep", "600"], os.environ, log).pid, flush=True)
            time.sleep(600)
            """),
        ],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    command = Path(f"/proc/{pid}/cmdline")
    await until(lambda: command.read_bytes().startswith(b"sleep"))
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    await until(lambda: not is_alive(pid))


def test_a_taken_port_is_refused_with_the_name_of_its_owner_and_the_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(PortTaken) as caught:
            PortReservation("127.0.0.1", port, "--http-port")
    assert f"port {port} on 127.0.0.1 is taken by" in str(caught.value)
    assert f"(pid {os.getpid()})" in str(caught.value)
    assert str(caught.value).endswith("choose another with --http-port")


def test_a_reserved_port_is_open_only_to_the_child() -> None:
    reservation = PortReservation("127.0.0.1", 0)
    try:
        with socket.create_server(("127.0.0.1", reservation.port)) as child_socket:
            assert child_socket.getsockname()[1] == reservation.port
        with socket.create_server(("127.0.0.1", reservation.port)):
            pass  # the child can take the port again after a restart
    finally:
        reservation.close()


def make_program(path: Path, says: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)
    return path


def test_an_old_server_on_the_path_is_passed_over(tmp_path: Path) -> None:
    old = make_program(tmp_path / "nats-server", "nats-server: v2.9.10")
    found = binaries.find(binaries.NATS, {"PATH": str(tmp_path)})
    assert found != old
    assert binaries.version_of(found) >= (2, 11)  # type: ignore[operator]  # it runs, so it has one


def test_a_named_server_that_is_too_old_is_an_error_that_names_the_variable(
    tmp_path: Path,
) -> None:
    old = make_program(tmp_path / "redis-server", "Redis server v=6.2.14 sha=0:0 malloc=libc")
    with pytest.raises(binaries.ServerNotFound, match=r"PDMESH_VALKEY_SERVER=.*redis-server >= 7"):
        binaries.find(binaries.VALKEY, {"PDMESH_VALKEY_SERVER": str(old)})


def test_a_good_server_on_the_path_comes_before_the_wheel(tmp_path: Path) -> None:
    good = make_program(tmp_path / "redis-server", "Redis server v=7.0.15 sha=0:0 malloc=libc")
    assert binaries.find(binaries.VALKEY, {"PATH": f"{tmp_path}:/usr/bin:/bin"}) == good
