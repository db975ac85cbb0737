"""Makes the NATS, Redis and sentinel servers of one host from the host's folder."""

from __future__ import annotations

from pathlib import Path

from pdmesh.core.access.process_identity import folder_of
from pdmesh.embedded.members import (
    NatsMember,
    RedisMember,
    RedisPlace,
    SentinelMember,
    User,
    WatchedPrimary,
)
from pdmesh.embedded.servers import Server
from pdmesh.launcher.hosts.folder import (
    PRIMARY,
    REPLICA_USER,
    SENTINEL_USER,
    HostFolder,
    redis_of,
)


def servers_of(folder: HostFolder, state_dir: Path) -> list[Server]:
    """NATS, Redis and a sentinel, or nothing if the host has no servers. Raises PortTaken."""
    if not folder.has_servers:
        return []
    layout = folder.layout
    ports, names = layout.ports, layout.server_hosts
    nats = NatsMember(
        state_dir / "nats",
        folder.path,
        folder.name,
        {name: layout.address(name) for name in names},
        (ports.nats, ports.nats_cluster),
    )
    first = layout.address(names[0])
    redis = RedisMember(
        _place(folder, state_dir / "redis", ports.redis, "redis.acl"),
        first,
        User(REPLICA_USER, folder.secrets.passwords[REPLICA_USER]),
    )
    sentinel = SentinelMember(
        _place(folder, state_dir / "sentinel", ports.sentinel, "sentinel.acl"),
        WatchedPrimary(PRIMARY, first, ports.redis, quorum=len(names) // 2 + 1),
        User(SENTINEL_USER, folder.secrets.passwords[SENTINEL_USER]),
    )
    return [nats, redis, sentinel]


def _place(folder: HostFolder, directory: Path, port: int, acl: str) -> RedisPlace:
    tls_dir = folder_of(folder.tls_dir, redis_of(folder.name))
    return RedisPlace(directory, folder.host.address, port, tls_dir, folder.path / acl)
