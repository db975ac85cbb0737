"""An operator's client, which calls the leading master.

The client also records all steps of groups and upgrades.
"""

from __future__ import annotations

from pdmesh.events.v1.events_pb2 import GroupStep, UpgradeStep
from pdmesh.net import subjects
from pdmesh.net.bus import Message
from pdmesh.net.events import decode_event
from pdmesh.net.grpc.admin_client import Invoke, T, call_leader
from pdmesh.net.nats.bus import NatsBus
from pdmesh.v1 import admin_service_pb2 as pb
from pdmesh.v1.common_pb2 import INSTANCE_PHASE_READY, ROLE_DECODE, ROLE_PREFILL
from tests.support.waiting import until

CHANGE_S = 60.0  # long enough for a slow and busy machine


class Operator:
    """Calls raise the errors of `call_leader`.

    A call looks for a leading master for `within_s`. `mesh_token` is the token of the mesh; None
    means the token of this process.
    """

    def __init__(
        self, bus: NatsBus, within_s: float = CHANGE_S, mesh_token: str | None = None
    ) -> None:
        self._bus, self._within_s, self._mesh_token = bus, within_s, mesh_token
        self.steps: list[GroupStep] = []
        self.upgrades: list[UpgradeStep] = []

    async def listen(self) -> None:
        await self._bus.subscribe(subjects.group_step(), self._on_step)
        await self._bus.subscribe(subjects.upgrade_step(), self._on_upgrade)

    async def _on_step(self, message: Message) -> None:
        self.steps.append(decode_event(message, GroupStep))

    async def _on_upgrade(self, message: Message) -> None:
        self.upgrades.append(decode_event(message, UpgradeStep))

    async def _call(self, invoke: Invoke[T]) -> T:
        return await call_leader(
            self._bus, "", invoke, within_s=self._within_s, mesh_token=self._mesh_token
        )

    async def groups(self) -> pb.ListGroupStatesResponse:
        request = pb.ListGroupStatesRequest()
        return await self._call(
            lambda stub, metadata, s: stub.ListGroupStates(request, metadata=metadata, timeout=s)
        )

    async def desired(self, version: int = 0) -> pb.DesiredVersion:
        request = pb.GetDesiredRequest(version=version)
        response = await self._call(
            lambda stub, metadata, s: stub.GetDesired(request, metadata=metadata, timeout=s)
        )
        return response.desired

    async def apply(self, text: str, canary_share: float = 0.0) -> pb.ApplyDesiredResponse:
        request = pb.ApplyDesiredRequest(
            text=text, author="test", reason="a test", canary_share=canary_share
        )
        return await self._call(
            lambda stub, metadata, s: stub.ApplyDesired(request, metadata=metadata, timeout=s)
        )

    async def rollback(self, version: int = 0) -> pb.RollbackDesiredResponse:
        request = pb.RollbackDesiredRequest(version=version, author="test", reason="a test")
        return await self._call(
            lambda stub, metadata, s: stub.RollbackDesired(request, metadata=metadata, timeout=s)
        )

    async def promote(self) -> pb.PromoteUpgradeResponse:
        request = pb.PromoteUpgradeRequest()
        return await self._call(
            lambda stub, metadata, s: stub.PromoteUpgrade(request, metadata=metadata, timeout=s)
        )

    async def cordon(self, instance_id: str, mode: pb.LeaveMode.ValueType) -> None:
        request = pb.CordonInstanceRequest(instance_id=instance_id, mode=mode, reason="a test")
        await self._call(
            lambda stub, metadata, s: stub.CordonInstance(request, metadata=metadata, timeout=s)
        )

    async def uncordon(self, instance_id: str) -> None:
        request = pb.UncordonInstanceRequest(instance_id=instance_id)
        await self._call(
            lambda stub, metadata, s: stub.UncordonInstance(request, metadata=metadata, timeout=s)
        )

    async def members(self, role: int) -> list[str]:
        """The members with this role that are ready."""
        states = await self.groups()
        return [
            m.instance_id
            for group in states.groups
            for m in group.members
            if (m.role, m.phase) == (role, INSTANCE_PHASE_READY)
        ]

    async def until_serving(self, num_prefill: int, num_decode: int) -> None:
        """Wait until one group serves with these numbers of instances."""

        async def is_serving() -> bool:
            states = await self.groups()
            is_there = [g.state == "serving" for g in states.groups] == [True]
            counts = (len(await self.members(ROLE_PREFILL)), len(await self.members(ROLE_DECODE)))
            return is_there and counts == (num_prefill, num_decode)

        await until(is_serving, within_s=CHANGE_S)

    def of(self, instance_id: str) -> list[str]:
        return [s.step for s in self.steps if s.instance_id == instance_id]
