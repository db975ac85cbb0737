"""The loops of the control plane. Every master runs them, but only the leader changes the mesh."""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from pdmesh.services.master_scheduler.admin.adapters import Adapters
from pdmesh.services.master_scheduler.admin.pins import Pins
from pdmesh.services.master_scheduler.groups.reconciler import GroupReconciler
from pdmesh.services.master_scheduler.overview.overview import Overview
from pdmesh.services.master_scheduler.plans.move_loop import MoveLoop
from pdmesh.services.master_scheduler.plans.upgrade_loop import UpgradeLoop
from pdmesh.services.master_scheduler.usage_loop import UsageLoop


@dataclass(frozen=True, slots=True)
class ControlLoops:
    """The loops through which operators see and change the mesh."""

    groups: GroupReconciler
    plans: MoveLoop
    upgrades: UpgradeLoop
    usage: UsageLoop
    pins: Pins
    adapters: Adapters
    overview: Overview

    def run(self) -> list[Coroutine[Any, Any, None]]:
        """The loops as coroutines. They never end, and if one fails, the master fails."""
        return [
            self.groups.run(),
            self.plans.run(),
            self.upgrades.run(),
            self.usage.run(),
            self.pins.run(),
            self.adapters.run(),
            self.overview.feed.run(),
        ]
