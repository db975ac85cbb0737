"""Reads the present state of a mesh: its registry, the leader's groups, and the instances' load.

If a process does not answer, only its answer is missing, because operators need the rest most when
something is broken.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import grpc

from pdmesh.client.admin_calls import AdminCalls
from pdmesh.errors import MeshError
from pdmesh.net.grpc import rpc
from pdmesh.net.nats.bus import NatsBus
from pdmesh.net.nats.registry import WATCHER_LEASE_S, NatsRegistry
from pdmesh.v1.admin_service_pb2 import ListGroupStatesResponse
from pdmesh.v1.common_pb2 import InstanceRecord
from pdmesh.v1.instance_service_pb2 import GetStatusRequest, GetStatusResponse
from pdmesh.v1.instance_service_pb2_grpc import InstanceServiceStub
from pdmesh.v1.scheduler_service_pb2 import InstanceState, ListGroupsRequest, ListGroupsResponse
from pdmesh.v1.scheduler_service_pb2_grpc import SchedulerServiceStub

INSTANCE_SERVICES: Final = ("prefill", "decode", "instance")
_ASK_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class MeshLook:
    records: Mapping[str, InstanceRecord]  # every registered process, by its id
    epoch: int | None  # the number of the master's leadership; None: no leader answers
    groups: ListGroupStatesResponse | None  # None: the leader refused, or none answers
    states: Mapping[str, InstanceState]  # health and faults, by instance
    answers: Mapping[str, GetStatusResponse]  # of the instances that answered, by id


async def look(bus: NatsBus, admin: AdminCalls, mesh_token: str | None = None) -> MeshLook:
    view = await NatsRegistry(bus, WATCHER_LEASE_S).watch()
    try:
        records = dict(view.records)
    finally:
        await view.close()
    groups = await _groups(admin)
    ranked, answers = await asyncio.gather(
        _ask_master(records, mesh_token), _ask_instances(records, mesh_token)
    )
    return MeshLook(
        records, ranked.epoch if ranked is not None else None, groups, _states(ranked), answers
    )


async def _groups(admin: AdminCalls) -> ListGroupStatesResponse | None:
    try:
        return await admin.groups()
    except MeshError:
        return None


async def _ask_master(
    records: Mapping[str, InstanceRecord], mesh_token: str | None
) -> ListGroupsResponse | None:
    for record in records.values():
        if record.service != "master-scheduler" or not record.grpc_address:
            continue
        async with rpc.channel_to(record, mesh_token) as channel:
            try:
                return await SchedulerServiceStub(channel).ListGroups(
                    ListGroupsRequest(), timeout=_ASK_S
                )
            except grpc.aio.AioRpcError:
                continue
    return None


def _states(groups: ListGroupsResponse | None) -> dict[str, InstanceState]:
    if groups is None:
        return {}
    return {i.record.instance_id: i for group in groups.groups for i in group.instances}


async def _ask_instances(
    records: Mapping[str, InstanceRecord], mesh_token: str | None
) -> dict[str, GetStatusResponse]:
    instances = [r for r in records.values() if r.service in INSTANCE_SERVICES and r.grpc_address]
    answers = await asyncio.gather(*(_ask_instance(r, mesh_token) for r in instances))
    return {r.instance_id: a for r, a in zip(instances, answers, strict=True) if a is not None}


async def _ask_instance(record: InstanceRecord, mesh_token: str | None) -> GetStatusResponse | None:
    async with rpc.channel_to(record, mesh_token) as channel:
        try:
            return await InstanceServiceStub(channel).GetStatus(GetStatusRequest(), timeout=_ASK_S)
        except grpc.aio.AioRpcError:
            return None
