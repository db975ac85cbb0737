"""A connection to a mesh, for programs that operate it (docs/python-client.md)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, Self

from pdmesh.client.admin_calls import AdminCalls
from pdmesh.client.events import MeshEvent, follow
from pdmesh.client.look import MeshLook, look
from pdmesh.config import url_problem, without_password
from pdmesh.errors import InvalidRequest, Unavailable
from pdmesh.net.grpc.admin_client import Invoke, T, call_leader
from pdmesh.net.nats.bus import NatsBus
from pdmesh.net.tasks import end
from pdmesh.net.tls.own_certificate import use_certificates

_CONNECT_S: Final = 3.0
_CALL_S: Final = 5.0


async def reach_nats(url: str, name: str, within_s: float | None = None) -> NatsBus:
    """Connect to NATS.

    Raises Unavailable if NATS does not answer in time (3 s by default), and InvalidRequest for a
    malformed URL.
    """
    if problem := url_problem(url):
        raise InvalidRequest(problem, field="nats_url")
    connecting = asyncio.create_task(NatsBus.connect(url, name))
    try:
        await asyncio.wait({connecting}, timeout=within_s or _CONNECT_S)
    finally:
        if not connecting.done():
            await end([connecting])  # nats-py may swallow one cancellation
    if not connecting.cancelled():
        return connecting.result()
    at = without_password(url)
    raise Unavailable(f"NATS does not answer at {at}, or rejects this user and password")


class Client(AdminCalls):
    """A connection to a mesh, made by `connect`.

    Every call is sent to the leading master, which the client finds in the registry.
    """

    def __init__(self, bus: NatsBus, admin_token: str, mesh_token: str, within_s: float) -> None:
        super().__init__(self._ask_leader)
        self._bus, self._within_s = bus, within_s
        self._admin_token, self._mesh_token = admin_token, mesh_token

    @classmethod
    @asynccontextmanager
    async def connect(
        cls,
        nats_url: str,
        *,
        admin_token: str = "",
        mesh_token: str = "",
        tls_dir: Path | None = None,
        nats_roles: bool = False,
        within_s: float = _CALL_S,
    ) -> AsyncIterator[Self]:
        """Connect to a mesh.

        `within_s` is the longest wait for NATS, and the longest time for which a call looks for a
        leading master. `tls_dir` has an operator's certificate (`pdmesh certs operator/NAME`). From
        then on, all connections of this process use this certificate, even those of other clients.
        Set `nats_roles` if NATS identifies its clients by their certificates, as with `pdmesh up
        --tls`. Raises BadCertificates, InvalidRequest, Unavailable.
        """
        if tls_dir is not None:
            from pdmesh.net.tls.certificate_renewal import CertificateFolder

            use_certificates(CertificateFolder(tls_dir), nats_roles=nats_roles)
        bus = await reach_nats(nats_url, "pdmesh-client", within_s)
        try:
            yield cls(bus, admin_token, mesh_token, within_s)
        finally:
            await bus.close()

    async def status(self) -> MeshLook:
        return await look(self._bus, self, self._mesh_token)

    def events(
        self, domains: Iterable[str] = (), *, periodic: bool = False
    ) -> AsyncIterator[MeshEvent]:
        """The events of these domains, by default of all, from the start of the iteration on.

        With `periodic`, they include heartbeats, node reports and loads, which are sent all the
        time. Raises InvalidRequest for an unknown domain.
        """
        return follow(self._bus, domains, periodic=periodic)

    async def _ask_leader(self, invoke: Invoke[T], /) -> T:
        return await call_leader(
            self._bus,
            self._admin_token,
            invoke,
            within_s=self._within_s,
            mesh_token=self._mesh_token,
        )
