"""Calls the AdminService of the leading master."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final, TypeVar

import grpc

from pdmesh.errors import MeshError, NotLeader, Unavailable
from pdmesh.net.grpc import rpc
from pdmesh.net.nats.bus import NatsBus
from pdmesh.net.nats.registry import WATCHER_LEASE_S, NatsRegistry
from pdmesh.v1.admin_service_pb2_grpc import AdminServiceStub
from pdmesh.v1.common_pb2 import InstanceRecord

if TYPE_CHECKING:
    from pdmesh.v1.admin_service_pb2_grpc import AdminServiceAsyncStub

_MASTER: Final = "master-scheduler"
_CALL_S: Final = 5.0
_AGAIN_S: Final = 0.2

T = TypeVar("T")
Metadata = tuple[tuple[str, str], ...]
# Makes one call with a stub, metadata and a timeout in seconds.
Invoke = Callable[["AdminServiceAsyncStub", Metadata, float], Awaitable[T]]


async def call_leader(
    bus: NatsBus,
    token: str,
    invoke: Invoke[T],
    *,
    within_s: float = _CALL_S,
    mesh_token: str | None = None,
) -> T:
    """Call the leading master, and retry until it answers.

    The token is sent only to the leader. Raises the error that the master answers with, or
    Unavailable if no leading master answers in time.
    """
    deadline = asyncio.get_running_loop().time() + within_s
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    why: MeshError = Unavailable("no master leads")
    while asyncio.get_running_loop().time() < deadline:
        if leader := await _leader(bus):
            async with rpc.channel_to(leader, mesh_token) as channel:
                try:
                    return await invoke(AdminServiceStub(channel), metadata, _CALL_S)
                except grpc.aio.AioRpcError as exc:
                    why = rpc.from_rpc_error(exc)
            if not isinstance(why, NotLeader | Unavailable):
                raise why
        await asyncio.sleep(_AGAIN_S)
    raise Unavailable(f"no leading master answers: {why.message}")


async def _leader(bus: NatsBus) -> InstanceRecord | None:
    """The master whose record says that it leads, or None.

    If two records say so, the one with the later epoch (the number of a leadership) counts.
    """
    view = await NatsRegistry(bus, WATCHER_LEASE_S).watch()
    try:
        leaders = [
            r
            for r in view.records.values()
            if r.service == _MASTER and r.is_leader and r.grpc_address
        ]
    finally:
        await view.close()
    return max(leaders, key=lambda r: r.epoch) if leaders else None
