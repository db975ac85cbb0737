"""Assembles the parts of a master that change the mesh, and the admin API for operators.

The parts manage groups, moves of instances between groups, upgrades, instances out of service,
pinned prefixes, LoRA adapters and usage. Every master runs these parts to follow the mesh, but only
the leader makes changes. So a part checks `leadership` before each write.
"""

from __future__ import annotations

from collections.abc import Callable

from google.protobuf.empty_pb2 import Empty

from pdmesh import api_keys
from pdmesh.api_keys import KeyFile
from pdmesh.core.ratio.scenario_windows import ScenarioWindows
from pdmesh.net.mesh_link import MeshLink
from pdmesh.net.nats.assignments import NatsAssignments
from pdmesh.net.nats.board import adapter_board, out_of_service_board, pin_board
from pdmesh.net.nats.desired_store import desired_store
from pdmesh.net.nats.usage_store import usage_store
from pdmesh.services.master_scheduler.admin.adapters import Adapters
from pdmesh.services.master_scheduler.admin.audit import AuditTrail, Changed
from pdmesh.services.master_scheduler.admin.callers import AdminAccess, AdminCaller
from pdmesh.services.master_scheduler.admin.checked_calls import CheckedCalls
from pdmesh.services.master_scheduler.admin.control_loops import ControlLoops
from pdmesh.services.master_scheduler.admin.pins import Pins
from pdmesh.services.master_scheduler.admin.servicer import AdminServicer
from pdmesh.services.master_scheduler.groups.cluster_view import ClusterView
from pdmesh.services.master_scheduler.groups.out_of_service import OutOfServiceBook
from pdmesh.services.master_scheduler.groups.reconciler import GroupReconciler
from pdmesh.services.master_scheduler.overview.history_feed import HistoryFeed
from pdmesh.services.master_scheduler.overview.overview import Overview
from pdmesh.services.master_scheduler.placement.servicer import PlanningCores
from pdmesh.services.master_scheduler.plans.move_loop import MoveLoop
from pdmesh.services.master_scheduler.plans.upgrade_feed import UpgradeFeed
from pdmesh.services.master_scheduler.plans.upgrade_loop import UpgradeLoop
from pdmesh.services.master_scheduler.settings import Settings
from pdmesh.services.master_scheduler.stored_epochs import highest_stored
from pdmesh.services.master_scheduler.usage_loop import UsageLoop

Leadership = Callable[[], tuple[bool, int]]  # whether this process leads, and its epoch


class Control:
    def __init__(
        self,
        settings: Settings,
        access: AdminAccess,
        link: MeshLink,
        cores: PlanningCores,
        leadership: Leadership,
    ) -> None:
        bus, placement, index = link.bus, cores.placement, cores.index
        fleet = placement.fleet
        self._assignments, self._store = NatsAssignments(bus), desired_store(bus)
        out_of_service = OutOfServiceBook(out_of_service_board(bus), fleet, leadership)
        view = ClusterView(fleet, link.view, self._assignments, self._store, out_of_service)
        secret = settings.hash_secret.get_secret_value().encode()
        groups = GroupReconciler(view, link.publisher, leadership)
        self.windows = ScenarioWindows()
        plans = MoveLoop(groups, self.windows, leadership, window_s=settings.ratio_window_s)
        upgrades = UpgradeLoop(groups, plans, link.publisher, leadership, placement.share_requests)
        usage = UsageLoop(groups, usage_store(bus), leadership)
        pins = Pins(pin_board(bus), index, link, secret, leadership)
        adapters = Adapters(adapter_board(bus), link.view, leadership)
        self.history = HistoryFeed(bus, fleet)
        overview = Overview(self.history, view, cores.backpressure)
        self.loops = ControlLoops(groups, plans, upgrades, usage, pins, adapters, overview)
        self.upgrade_feed = UpgradeFeed(fleet, bus, upgrades.tell)
        servicer = AdminServicer(access.page_url, self.loops, leadership)
        self._leadership = leadership
        self._audit = AuditTrail(link.publisher, settings.instance_id)
        self.calls = CheckedCalls(servicer, access, self._audit)

    async def keys_changed(self, before: KeyFile, after: KeyFile) -> None:
        """Report a change of the key file, if this master leads. Every master reads the file."""
        if self._leadership()[0]:
            changed = Changed(Empty(), "key-file", *api_keys.difference(before, after))
            await self._audit.tell(AdminCaller("file", "key_file", None), "KeyFile", changed)

    async def highest_epoch(self) -> int:
        """The highest epoch in the stored data (see `highest_stored`)."""
        return await highest_stored(self._assignments, self._store)
