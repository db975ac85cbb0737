"""The servers that one host runs in a mesh over several hosts: NATS, Redis and a sentinel.

The servers of all hosts form clusters, with mutual TLS. The NATS servers replicate their data.
Redis (or Valkey) has one primary, which the sentinels choose, and replicas that follow it. All
servers keep their data on disk. Redis and the sentinels also rewrite their own configuration files,
so that each knows its role after a restart.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pdmesh.atomic_file import write_atomically
from pdmesh.embedded.binaries import NATS, VALKEY, find
from pdmesh.embedded.ports import PortReservation
from pdmesh.embedded.servers import NO_USER, context_of, make_private, says, shakes_hands
from pdmesh.errors import BadCertificates
from pdmesh.net.addresses import join

_NATS_CONFIG: Final = """\
listen: "{address}"
server_name: "{name}"
include "{accounts}"
{tls}max_payload: 8MB
write_deadline: "2s"
ping_interval: "2s"
ping_max: 2
jetstream {{
  store_dir: "{store}"
  max_mem: 64MB
  max_file: 1GB
}}
cluster {{
  name: pdmesh
  listen: "{cluster_address}"
  no_advertise: true
  connect_retries: 10
  routes: {routes}
{cluster_tls}}}
"""
_TLS: Final = """\
tls {{
  cert_file: "{folder}/tls.crt"
  key_file: "{folder}/tls.key"
  ca_file: "{folder}/ca.crt"
  {more}
}}
"""
# A primary takes no writes while no replica follows it (`min-replicas-to-write`). Such a primary
# may be cut off from the network while the sentinels choose another one. The append-only file keeps
# the data over a restart. Without the file, a restarted primary would have no data, and its
# replicas would drop theirs.
_REDIS_CONFIG: Final = """\
bind {address}
port 0
tls-port {port}
{tls}aclfile "{acl}"
masteruser {replica_user}
masterauth {replica_password}
replica-announce-ip {address}
replica-announce-port {port}
repl-timeout 10
repl-ping-replica-period 1
min-replicas-to-write 1
min-replicas-max-lag 5
save ""
appendonly yes
maxmemory 256mb
maxmemory-policy noeviction
dir "{directory}"
{replicaof}"""
_SENTINEL_CONFIG: Final = """\
bind {address}
port 0
tls-port {port}
{tls}aclfile "{acl}"
dir "{directory}"
sentinel announce-ip {address}
sentinel announce-port {port}
sentinel sentinel-user {user}
sentinel sentinel-pass {password}
sentinel monitor {primary} {primary_address} {primary_port} {quorum}
sentinel auth-user {primary} {user}
sentinel auth-pass {primary} {password}
sentinel down-after-milliseconds {primary} 2000
sentinel failover-timeout {primary} 10000
sentinel parallel-syncs {primary} 1
"""
_REDIS_TLS: Final = """\
tls-cert-file "{folder}/tls.crt"
tls-key-file "{folder}/tls.key"
tls-ca-cert-file "{folder}/ca.crt"
tls-auth-clients yes
tls-replication yes
"""


@dataclass(frozen=True)
class User:
    name: str
    password: str = field(repr=False)


class NatsMember:
    """One nats-server of a cluster, with JetStream."""

    name = "nats"

    def __init__(
        self,
        directory: Path,
        files: Path,
        host: str,
        addresses: Mapping[str, str],
        ports: tuple[int, int],
    ) -> None:
        """Reserve the port for clients.

        `files` is a folder with tls/nats/HOST, cluster-tls and accounts.conf. `addresses` has the
        address of each member's host. `ports` are the ports for clients and for other members.
        """
        self._directory, self._folder = directory, files.absolute()
        self._host, self._addresses = host, addresses
        self._port = PortReservation(addresses[host], ports[0], "ports.nats")
        self._cluster_port = ports[1]

    @property
    def url(self) -> str:
        return f"tls://{self._port.address}"

    @property
    def watched(self) -> list[Path]:
        """The files that NATS reads again after a SIGHUP."""
        own = (self._tls_dir / name for name in ("tls.crt", "tls.key", "ca.crt"))
        return [self._folder / "accounts.conf", *own]

    @property
    def _tls_dir(self) -> Path:
        return self._folder / "tls" / "nats" / self._host

    def command(self) -> list[str]:
        binary = find(NATS)
        make_private(self._directory)
        others = [a for host, a in self._addresses.items() if host != self._host]
        routes = ", ".join(f'"tls://{join(each, self._cluster_port)}"' for each in others)
        text = _NATS_CONFIG.format(
            address=self._port.address,
            name=self._host,
            accounts=os.path.relpath(self._folder / "accounts.conf", self._directory),
            tls=_TLS.format(
                folder=self._tls_dir, more="verify_and_map: true\n  handshake_first: true"
            ),
            store=(self._directory / "jetstream").absolute(),
            cluster_address=join(self._addresses[self._host], self._cluster_port),
            routes=f"[{routes}]",
            cluster_tls=_TLS.format(
                folder=self._folder / "cluster-tls", more="verify: true\n  timeout: 5"
            ),
        )
        config = self._directory / "nats.conf"
        write_atomically(config, text)
        return [str(binary), "-c", str(config.absolute())]

    async def is_ready(self) -> bool:
        try:
            context = context_of(self._tls_dir)
        except (BadCertificates, OSError):
            return False
        connecting = asyncio.open_connection(self._port.host, self._port.port, ssl=context)
        return await says(connecting, b"", (b"INFO ",))

    async def is_alive(self) -> bool:
        """Whether the server answers, even if its certificate is not accepted."""
        return await shakes_hands(self._port.host, self._port.port)

    def close(self) -> None:
        self._port.close()


@dataclass(frozen=True)
class RedisPlace:
    """The address and the files of a Redis server or a sentinel."""

    directory: Path
    address: str
    port: int
    tls_dir: Path
    acl: Path

    @property
    def settings(self) -> dict[str, object]:
        return {
            "address": self.address,
            "port": self.port,
            "tls": _REDIS_TLS.format(folder=self.tls_dir.absolute()),
            "acl": self.acl.absolute(),
            "directory": self.directory.absolute(),
        }


class _RedisProcess:
    """A Redis or Valkey process with TLS, which rewrites its own configuration file."""

    name: str

    def __init__(self, place: RedisPlace) -> None:
        self._place = place
        self._port = PortReservation(place.address, place.port, f"ports.{self.name}")

    @property
    def url(self) -> str:
        return f"rediss://{self._port.address}"

    def command(self) -> list[str]:
        binary = find(VALKEY)
        make_private(self._place.directory)
        config = self._place.directory / f"{self.name}.conf"
        self._write_once(config, self._text())
        return [str(binary), str(config.absolute()), *self._options()]

    def _text(self) -> str:
        raise NotImplementedError

    def _options(self) -> Sequence[str]:
        return ()

    def _write_once(self, config: Path, text: str) -> None:
        """Write the configuration, but only if `text` has changed since the last time.

        If not, the file stays as the server has rewritten it.
        """
        prepared = config.with_suffix(".prepared")
        if config.exists() and prepared.exists() and prepared.read_text() == text:
            return
        write_atomically(config, text)
        write_atomically(prepared, text)

    async def is_ready(self) -> bool:
        try:
            context = context_of(self._place.tls_dir)
        except (BadCertificates, OSError):
            return False
        connecting = asyncio.open_connection(self._port.host, self._port.port, ssl=context)
        return await says(connecting, b"PING\r\n", (b"+PONG", NO_USER, b"-LOADI", b"-MASTE"))

    async def is_alive(self) -> bool:
        """Whether the server answers, even if its certificate is not accepted."""
        return await shakes_hands(self._port.host, self._port.port)

    def close(self) -> None:
        self._port.close()


class RedisMember(_RedisProcess):
    """One Redis server. At the first start, it is the primary on the first host, else a replica."""

    name = "redis"

    def __init__(self, place: RedisPlace, first_primary: str, replica: User) -> None:
        """`first_primary` is an address. `replica` is the user with which replicas connect."""
        super().__init__(place)
        self._first_primary, self._replica = first_primary, replica

    def _text(self) -> str:
        is_first = self._place.address == self._first_primary
        replicaof = "" if is_first else f"replicaof {self._first_primary} {self._place.port}\n"
        return _REDIS_CONFIG.format(
            **self._place.settings,
            replicaof=replicaof,
            replica_user=self._replica.name,
            replica_password=self._replica.password,
        )


@dataclass(frozen=True)
class WatchedPrimary:
    """The primary that the sentinels watch at first.

    The sentinels choose another primary only if `quorum` of them find this one gone.
    """

    name: str
    address: str
    port: int
    quorum: int


class SentinelMember(_RedisProcess):
    name = "sentinel"

    def __init__(self, place: RedisPlace, watched: WatchedPrimary, user: User) -> None:
        super().__init__(place)
        self._watched, self._user = watched, user

    def _text(self) -> str:
        return _SENTINEL_CONFIG.format(
            **self._place.settings,
            user=self._user.name,
            password=self._user.password,
            primary=self._watched.name,
            primary_address=self._watched.address,
            primary_port=self._watched.port,
            quorum=self._watched.quorum,
        )

    def _options(self) -> Sequence[str]:
        return ("--sentinel",)
