"""Fixtures that run the NATS and Redis servers of three hosts on addresses of this machine's
loopback device.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pdmesh.core.access.operator_roles import AdminRole
from pdmesh.core.access.process_identity import ProcessIdentity
from pdmesh.embedded.members import (
    NatsMember,
    RedisMember,
    RedisPlace,
    SentinelMember,
    User,
    WatchedPrimary,
)
from pdmesh.launcher.hosts.folder import REPLICA_USER, SENTINEL_USER
from pdmesh.launcher.hosts.prepare import redis_users, sentinel_users
from pdmesh.net.nats.bus import NatsBus
from pdmesh.net.tls.authority import Authority
from pdmesh.net.tls.certificate_renewal import CertificateFolder
from pdmesh.net.tls.own_certificate import using_certificates
from pdmesh.server_permissions.nats_accounts import Holder, nats_accounts
from pdmesh.server_permissions.role_permissions import REDIS_ROLES
from tests.support.sites.certificates import TestAuthority
from tests.support.sites.servers import TestServer

ROOT = Path(__file__).parents[3]
HOSTS = {"a": "127.0.0.1", "b": "127.0.0.2", "c": "127.0.0.3"}
PRIMARY = "pdmesh"
PROCESSES = (
    ("master-scheduler", "m"), ("gateway", "g"), ("prefill", "p"), (str(AdminRole.VIEWER), "ann"),
)  # fmt: skip


def free_port() -> int:
    """A port that is free on every host."""
    while True:
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            first = stack.enter_context(socket.create_server((HOSTS["a"], 0)))
            port = int(first.getsockname()[1])
            for address in list(HOSTS.values())[1:]:
                stack.enter_context(socket.create_server((address, port)))
            return port


@dataclass
class NatsCluster:
    ours: TestAuthority
    ports: tuple[int, int]
    members: dict[str, TestServer] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return "tls://" + ",".join(f"{address}:{self.ports[0]}" for address in HOSTS.values())

    @contextlib.contextmanager
    def being(self, role: str, instance_id: str) -> Iterator[None]:
        folder = CertificateFolder(self.ours.root / role / instance_id)
        with using_certificates(folder, nats_roles=True):
            yield

    async def bus(self, role: str, instance_id: str, num_replicas: int | None = 3) -> NatsBus:
        with self.being(role, instance_id):
            return await NatsBus.connect(self.url, instance_id, num_replicas)


@pytest.fixture
def ours(tmp_path: Path) -> TestAuthority:
    return TestAuthority(tmp_path / "tls")


@pytest.fixture
async def nats_cluster(tmp_path: Path, ours: TestAuthority) -> AsyncIterator[NatsCluster]:
    cluster = NatsCluster(ours, (free_port(), free_port()))
    of_cluster = Authority.opened(tmp_path / "cluster")
    for process in PROCESSES:
        ours.issue(*process)
    for host, address in HOSTS.items():
        ours.issue("nats", host, names=[address])
        files = tmp_path / "files" / host
        of_cluster.issue(ProcessIdentity("nats", host), files / "cluster-tls", [address])
        (files / "tls").symlink_to(ours.root)
        holders = [Holder(*process) for process in PROCESSES]
        (files / "accounts.conf").write_text(nats_accounts(holders))
        directory = tmp_path / host / "nats"
        member = NatsMember(directory, files, host, HOSTS, cluster.ports)
        cluster.members[host] = TestServer(member, directory)
    try:
        for server in cluster.members.values():
            await server.start()
        yield cluster
    finally:
        for server in cluster.members.values():
            server.close()


@dataclass
class RedisTrio:
    """A Redis with two replicas and three sentinels."""

    passwords: dict[str, str]
    ports: tuple[int, int]
    servers: dict[str, TestServer] = field(default_factory=dict)
    sentinels: dict[str, TestServer] = field(default_factory=dict)

    def url(self, role: str) -> str:
        sentinels = ",".join(f"{address}:{self.ports[1]}" for address in HOSTS.values())
        user = f"{role}:{self.passwords[role]}"
        return f"rediss-sentinel://{user}@{sentinels}/0?primary={PRIMARY}"


def redis_with_tls() -> str:
    """The path of a Redis server with TLS, or an empty text if there is none."""
    given = os.environ.get("PDMESH_VALKEY_SERVER", str(ROOT / ".cache/redis/redis-server"))
    return given if Path(given).exists() else ""


@pytest.fixture
async def redis_trio(
    tmp_path: Path, ours: TestAuthority, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[RedisTrio]:
    if not (program := redis_with_tls()):
        pytest.skip("needs a Redis with TLS: run .ci/redis, or set PDMESH_VALKEY_SERVER")
    monkeypatch.setenv("PDMESH_VALKEY_SERVER", program)
    users = (*REDIS_ROLES, REPLICA_USER, SENTINEL_USER)
    trio = RedisTrio({user: f"password-of-{user}" for user in users}, (free_port(), free_port()))
    (tmp_path / "redis.acl").write_text(redis_users(trio.passwords))
    (tmp_path / "sentinel.acl").write_text(sentinel_users(trio.passwords))
    watched = WatchedPrimary(PRIMARY, HOSTS["a"], trio.ports[0], quorum=2)
    for host, address in HOSTS.items():
        tls = ours.issue("redis", host, names=[address])

        def place(kind: str, port: int, host: str = host, tls: Path = tls) -> RedisPlace:
            directory, acl = tmp_path / host / kind, tmp_path / f"{kind}.acl"
            return RedisPlace(directory, HOSTS[host], port, tls, acl)

        replica = User(REPLICA_USER, trio.passwords[REPLICA_USER])
        server = RedisMember(place("redis", trio.ports[0]), HOSTS["a"], replica)
        trio.servers[host] = TestServer(server, tmp_path / host / "redis")
        sentinel = SentinelMember(
            place("sentinel", trio.ports[1]),
            watched,
            User(SENTINEL_USER, trio.passwords[SENTINEL_USER]),
        )
        trio.sentinels[host] = TestServer(sentinel, tmp_path / host / "sentinel")
    everything = (*trio.servers.values(), *trio.sentinels.values())
    try:
        for each in everything:
            each.directory.mkdir(parents=True)
            await each.start()
        yield trio
    finally:
        for each in everything:
            each.close()
