"""Starts a NATS server that gives each role of the mesh's processes its own rights, and clients
with the certificates of these roles.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any, Final

from nats.aio.client import Client

from pdmesh.embedded.servers import NatsServer
from pdmesh.net.nats.buckets import ALL_BUCKETS, IMPORTED_API, LEASED, inbox_of
from pdmesh.net.nats.bus import NatsBus
from pdmesh.net.nats.kv_bucket import KvBucket
from pdmesh.net.tls.contexts import client_context
from pdmesh.net.tls.own_certificate import using_certificates
from pdmesh.server_permissions.nats_accounts import Holder, nats_accounts
from tests.support.sites.certificates import TestAuthority
from tests.support.sites.servers import TestServer
from tests.support.waiting import until

HOST: Final = "127.0.0.1"
# One process of each role, and a second prefill. The tests check that no prefill can write the
# record of the other.
PROCESSES: Final = (
    ("gateway", "gateway-0"),
    ("master-scheduler", "master-0"),
    ("kv-cache-index", "index-0"),
    ("health-monitor", "monitor-0"),
    ("node-agent", "agent-0"),
    ("prefill", "prefill-0"),
    ("prefill", "prefill-1"),
    ("decode", "decode-0"),
    ("instance", "instance-0"),
    ("operator", "ann"),
)
LEASE_S: Final = 600.0


class RoleClient:
    """A nats-py client with a process's certificate. It records the subjects that NATS refused."""

    def __init__(self, role: str, instance_id: str) -> None:
        self.role, self.instance_id = role, instance_id
        self.client: Any = Client()  # nats-py has no types
        self._refused: list[str] = []
        self._num_marks = 0

    async def connect(self, url: str, ours: TestAuthority) -> None:
        await self.client.connect(
            url,
            tls=client_context(ours.folder(self.role, self.instance_id)),
            tls_handshake_first=True,
            inbox_prefix=inbox_of(self.role, self.instance_id),
            error_cb=self._on_error,
            allow_reconnect=False,
            connect_timeout=30,
        )

    async def _on_error(self, error: Exception) -> None:
        self._refused.append(str(error).lower())

    async def allowed_to_send(self, subjects: Iterable[str]) -> set[str]:
        """The subjects to which NATS lets this client publish."""
        tried = list(subjects)
        for subject in tried:
            await self.client.publish(subject, b"{}")
        said = await self._all_said()
        return {s for s in tried if f'publish to "{s.lower()}"' not in said}

    async def allowed_to_hear(self, patterns: Iterable[str]) -> set[str]:
        tried = list(patterns)
        for pattern in tried:
            await self.client.subscribe(pattern, cb=_ignore)
        said = await self._all_said()
        return {p for p in tried if f'subscription to "{p.lower()}"' not in said}

    async def _all_said(self) -> str:
        """All refusals until now, as one text.

        NATS sends refusals in order. So the client publishes to a forbidden subject of its own, the
        mark, and waits for the refusal of the mark.
        """
        self._num_marks += 1
        mark = f"refused.{self._num_marks}"
        await self.client.publish(mark, b"")
        await until(lambda: any(f'"{mark}"' in each for each in reversed(self._refused)))
        return "\n".join(self._refused)

    @property
    def jetstream(self) -> Any:
        return self.client.jetstream(timeout=20, prefix=IMPORTED_API)


async def _ignore(_: object) -> None:
    pass


@contextlib.asynccontextmanager
async def nats_with(
    directory: Path, ours: TestAuthority, holders: Iterable[Holder]
) -> AsyncIterator[TestServer]:
    accounts = directory / "accounts.conf"
    accounts.write_text(nats_accounts(holders))
    folder = ours.issue("nats", "nats", names=[HOST])
    server = NatsServer(directory / "nats", tls_dir=folder, accounts=accounts)
    running = TestServer(server, directory / "nats")
    await running.start()
    try:
        yield running
    finally:
        running.close()


@contextlib.asynccontextmanager
async def connected(
    server: TestServer, ours: TestAuthority, role: str, instance_id: str
) -> AsyncIterator[RoleClient]:
    caller = RoleClient(role, instance_id)
    await caller.connect(server.url, ours)
    try:
        yield caller
    finally:
        await caller.client.close()


@contextlib.asynccontextmanager
async def bus_of(
    server: TestServer, ours: TestAuthority, role: str, instance_id: str
) -> AsyncIterator[NatsBus]:
    with using_certificates(ours.folder(role, instance_id), nats_roles=True):
        bus = await NatsBus.connect(server.url, instance_id)
    try:
        yield bus
    finally:
        await bus.close()


def bucket(bus: NatsBus, name: str) -> KvBucket:
    return KvBucket(bus, name, ttl_s=LEASE_S if name in LEASED else 0.0)


async def make_buckets(bus: NatsBus) -> None:
    for name in ALL_BUCKETS:
        await bucket(bus, name).ensure()
