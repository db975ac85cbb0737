"""The parts of a master that control groups, with a registry in memory."""

from __future__ import annotations

import asyncio
from typing import Any

from pdmesh.core.health.fault_levels import FaultJudged, Level
from pdmesh.core.kv.prefix.prefix_index import PrefixIndex
from pdmesh.core.placement.fleet import Fleet, InstanceRecorded
from pdmesh.core.ratio.scenario_windows import ScenarioWindows
from pdmesh.core.request.backpressure import Backpressure
from pdmesh.net.events import EventPublisher
from pdmesh.net.mesh_link import MeshLink
from pdmesh.net.nats.board import Board
from pdmesh.net.nats.desired_store import DesiredStore
from pdmesh.net.nats.usage_store import UsageStore
from pdmesh.services.master_scheduler.admin.adapters import Adapters
from pdmesh.services.master_scheduler.admin.audit import AuditTrail
from pdmesh.services.master_scheduler.admin.callers import AdminAccess
from pdmesh.services.master_scheduler.admin.checked_calls import CheckedCalls
from pdmesh.services.master_scheduler.admin.control_loops import ControlLoops
from pdmesh.services.master_scheduler.admin.pins import Pins
from pdmesh.services.master_scheduler.admin.servicer import AdminServicer
from pdmesh.services.master_scheduler.groups.cluster_view import ClusterView
from pdmesh.services.master_scheduler.groups.out_of_service import OutOfServiceBook
from pdmesh.services.master_scheduler.groups.reconciler import GroupReconciler
from pdmesh.services.master_scheduler.overview.history_feed import HistoryFeed
from pdmesh.services.master_scheduler.overview.overview import Overview
from pdmesh.services.master_scheduler.placement.convert import identity_from
from pdmesh.services.master_scheduler.plans.move_loop import MoveLoop
from pdmesh.services.master_scheduler.plans.upgrade_loop import UpgradeLoop
from pdmesh.services.master_scheduler.usage_loop import UsageLoop
from pdmesh.v1 import admin_service_pb2 as pb
from pdmesh.v1.admin_service_pb2 import OutOfService
from pdmesh.v1.common_pb2 import (
    INSTANCE_PHASE_BLANK,
    INSTANCE_PHASE_READY,
    ROLE_NONE,
    InstanceRecord,
    Role,
)
from tests.fakes.kv.memory_kv import MemoryBucket
from tests.fakes.memory_assignments import MemoryAssignments, MemoryAssignmentStore
from tests.fakes.memory_bus import MemoryBus
from tests.fakes.memory_registry import MemoryStore, MemoryView

CHAT = "scenarios:\n  default: {allow_single: true}\ngroups:\n  chat: {prefill: 1, decode: 1}\n"


class Site:
    """A master's control loops and admin service. The master leads in epoch 1."""

    def __init__(self) -> None:
        self.registry, self.given = MemoryStore(), MemoryAssignmentStore()
        self.desired_bucket, self.out_of_service_bucket = MemoryBucket(), MemoryBucket()
        self.leadership = (True, 1)
        self.fleet = Fleet()
        self.store: DesiredStore = DesiredStore(self.desired_bucket)  # type: ignore[arg-type]  # a fake
        self._views: list[ClusterView] = []

    async def start(self) -> None:
        """Start a new master, which knows only the contents of the registry."""
        board: Board[OutOfService] = Board(self.out_of_service_bucket, OutOfService)  # type: ignore[arg-type]  # a fake
        view = MemoryView(self.registry)
        self.out_of_service = OutOfServiceBook(board, self.fleet, lambda: self.leadership)
        assignments = MemoryAssignments(self.given)
        self.view = ClusterView(
            self.fleet, view, assignments, self.store, self.out_of_service, lambda: 0.0
        )
        self._views.append(self.view)
        leads = lambda: self.leadership  # noqa: E731
        events = EventPublisher(MemoryBus(), "master", 1)
        self.loop = GroupReconciler(self.view, events, leads, lambda: 0.0)
        self.plans = MoveLoop(self.loop, ScenarioWindows(), leads, lambda: 0.0)
        self.shares: dict[str, float] = {}
        self.upgrades = UpgradeLoop(
            self.loop, self.plans, events, leads, self.shares.update, lambda: 0.0
        )
        usage = UsageLoop(self.loop, UsageStore(MemoryBucket()), leads)  # type: ignore[arg-type]  # a fake
        pins = self._pins(MeshLink(MemoryBus(), view, events))  # type: ignore[arg-type]  # a fake
        bucket: Any = self.out_of_service_bucket  # a fake, which is never opened
        registered = Board(bucket, pb.RegisteredAdapter)
        adapters = Adapters(registered, view, leads)
        self.history = HistoryFeed(MemoryBus(), self.fleet)
        self.backpressure = Backpressure(lambda scenario, now: 0.0, 64)
        overview = Overview(self.history, self.view, self.backpressure)
        loops = ControlLoops(self.loop, self.plans, self.upgrades, usage, pins, adapters, overview)
        self.bus = MemoryBus()
        audit = AuditTrail(EventPublisher(self.bus, "master", 1), "master")
        self.admin: Any = CheckedCalls(AdminServicer(str, loops, leads), AdminAccess(""), audit)
        opening = asyncio.create_task(self.view.open())
        await asyncio.sleep(0)
        self.reopen()
        await opening

    def _pins(self, link: MeshLink) -> Pins:
        board: Board[pb.Pin] = Board(self.out_of_service_bucket, pb.Pin)  # type: ignore[arg-type]  # a fake; never opened
        return Pins(board, PrefixIndex(), link, b"k", lambda: self.leadership)

    async def close(self) -> None:
        for view in self._views:
            await view.close()

    def reopen(self) -> None:
        for watch in (*self.desired_bucket.watches, *self.out_of_service_bucket.watches):
            if not watch.is_live:
                watch.open()

    async def apply(self, text: str) -> None:
        await self.store.apply(text, expected_version=None, author="ann", reason="")

    def add(self, name: str, role: Role.ValueType = ROLE_NONE, group_id: str = "") -> None:
        phase = INSTANCE_PHASE_BLANK if role == ROLE_NONE else INSTANCE_PHASE_READY
        record = InstanceRecord(
            instance_id=name, incarnation=7, service="instance", role=role, phase=phase,
            group_id=group_id,
            scenario="default", model="m", num_slots=8, num_kv_blocks=100, block_size=64,
            max_model_len=4096,
        )  # fmt: skip
        self.registry.records[name] = record
        if identity := identity_from(record):
            self.fleet.handle(InstanceRecorded(identity), 0.0)

    def break_(self, name: str, level: Level, since: float = 0.0) -> None:
        self.fleet.handle(FaultJudged(name, 7, level, ("ECC",), held_back="", since=since), 0.0)

    def stages(self) -> dict[str, int]:
        return {k: a.stage for k, (_, a) in sorted(self.given.values.items()) if a is not None}

    def stored_out_of_service(self) -> dict[str, bytes]:
        return {
            k: e.value for k, e in self.out_of_service_bucket.entries.items() if e.value is not None
        }

    async def ask(self, name: str, request: Any) -> Any:
        return await getattr(self.admin, name)(request, Caller())

    async def cordon(self, name: str, mode: pb.LeaveMode.ValueType) -> None:
        await self.ask("CordonInstance", pb.CordonInstanceRequest(instance_id=name, mode=mode))


class Caller:
    def invocation_metadata(self) -> tuple[()]:
        return ()

    def peer(self) -> str:
        return "unix:"
