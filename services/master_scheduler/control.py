"""A master's work beside placement: groups, plans, upgrades, cordons, pins, usage, and their admin
API.

Every part works at the leader only, and checks `leadership` before it writes.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from pdmesh.core.kv.prefix.prefix_index import PrefixIndex
from pdmesh.core.placement.fleet import Fleet
from pdmesh.core.ratio.scenario_windows import ScenarioWindows
from pdmesh.net.events import EventPublisher
from pdmesh.net.nats.assignments import NatsAssignments
from pdmesh.net.nats.board import out_of_service_board, pin_board
from pdmesh.net.nats.bus import NatsBus
from pdmesh.net.nats.desired_store import desired_store
from pdmesh.net.nats.usage_store import usage_store
from pdmesh.net.registry import RegistryView
from pdmesh.services.master_scheduler.admin.access import AdminAccess
from pdmesh.services.master_scheduler.admin.pins import Pins
from pdmesh.services.master_scheduler.admin.servicer import AdminServicer
from pdmesh.services.master_scheduler.groups.group_loop import GroupLoop
from pdmesh.services.master_scheduler.groups.out_of_service import OutOfServiceBook
from pdmesh.services.master_scheduler.plans.plan_loop import PlanLoop
from pdmesh.services.master_scheduler.plans.upgrade_feed import UpgradeFeed
from pdmesh.services.master_scheduler.plans.upgrade_loop import UpgradeLoop
from pdmesh.services.master_scheduler.settings import Settings
from pdmesh.services.master_scheduler.stored_epochs import highest_stored
from pdmesh.services.master_scheduler.usage_loop import UsageLoop

Leadership = Callable[[], tuple[bool, int]]  # whether this process leads, and its epoch


class Control:
    """`on_shares` is called with the canaries' shares of their scenarios' requests."""

    def __init__(
        self,
        settings: Settings,
        admin_token: str,
        bus: NatsBus,
        view: RegistryView,
        publisher: EventPublisher,
        fleet: Fleet,
        index: PrefixIndex,
        leadership: Leadership,
        on_shares: Callable[[Mapping[str, float]], None],
        page_url: Callable[[], str],
    ) -> None:
        self._assignments, self._store = NatsAssignments(bus), desired_store(bus)
        store = self._store
        out_of_service = OutOfServiceBook(out_of_service_board(bus), fleet, leadership)
        secret = settings.hash_secret.get_secret_value().encode()
        self.pins = Pins(pin_board(bus), index, view, publisher, secret, leadership)
        self.windows = ScenarioWindows()
        self.groups = GroupLoop(
            fleet, view, self._assignments, store, out_of_service, publisher, leadership
        )
        self._plans = PlanLoop(
            fleet, self.groups, store, self.windows, leadership, window_s=settings.ratio_window_s
        )
        self._upgrades = UpgradeLoop(
            fleet, self.groups, store, self._plans, publisher, leadership, on_shares
        )
        self.upgrade_feed = UpgradeFeed(fleet, bus, self._upgrades.tell)
        self._usage = UsageLoop(self.groups, usage_store(bus), leadership)
        self.servicer = AdminServicer(
            AdminAccess(admin_token),
            self.groups,
            self._upgrades,
            self._plans,
            store,
            out_of_service,
            self.pins,
            view,
            leadership,
            self._usage.message,
            page_url,
        )

    def loops(self) -> list[Coroutine[Any, Any, None]]:
        """They never end; a failure of one is the master's."""
        return [
            self.groups.run(),
            self._plans.run(),
            self.upgrade_feed.run(),
            self._upgrades.run(),
            self._usage.run(),
            self.pins.run(),
        ]

    async def highest_epoch(self) -> int:
        """See `highest_stored`."""
        return await highest_stored(self._assignments, self._store)
