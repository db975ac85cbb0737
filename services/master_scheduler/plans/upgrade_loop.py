"""Runs upgrades while this master leads (S24).

In an upgrade, the groups of a scenario get a new revision of their service one after another.

Each round looks at the groups, lets the upgrade controller decide, and writes a record of each
upgrade to NATS. The record says which revision each group should run. The group reconciler acts on
this record. To roll back, the loop also writes the earlier version of the desired state again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol, get_args

import structlog

from pdmesh.core.groups.adjustments import adjusted
from pdmesh.core.groups.cluster_state import Observed
from pdmesh.core.groups.revisions import Upgrade, shares
from pdmesh.core.groups.step_announcements import AnnounceStep
from pdmesh.core.model import Assignment, Role
from pdmesh.core.upgrade.controller import UpgradeController
from pdmesh.core.upgrade.events import (
    AnnounceUpgradeStep,
    DropRecord,
    Effect,
    KeepRecord,
    MemberLost,
    Promoted,
    RestoreVersion,
    UpgradeReport,
    UpgradeStepKind,
)
from pdmesh.core.upgrade.observation import Surroundings, observe
from pdmesh.core.upgrade.revision_health import GroupRevision, LegFailureReported, RequestAnswered
from pdmesh.desired_file import read
from pdmesh.errors import InvalidRequest, NotLeader, Unavailable, VersionConflict
from pdmesh.events.v1.events_pb2 import UpgradeStep
from pdmesh.net import subjects
from pdmesh.net.events import EventPublisher
from pdmesh.services.master_scheduler.groups.cluster_view import KV_TRANSPORT
from pdmesh.services.master_scheduler.groups.reconciler import GroupReconciler
from pdmesh.services.master_scheduler.groups.upgrade_convert import upgrades_to
from pdmesh.telemetry import metrics, names

log = structlog.get_logger(__name__)

_TICK_S: Final = 1.0
_AUTHOR: Final = "master-scheduler"
_FAULTY_STEPS: Final = frozenset({"lost", "failed"})  # steps that a bad revision may cause
_OF_HARDWARE: Final = ("DEVICE_", "NODE_")  # prefixes of a fault's reasons that no revision causes


class Plans(Protocol):
    """The part of the move loop that is used here."""

    def busy(self, group_id: str, role: Role) -> float | None: ...
    def planning(self) -> frozenset[str]: ...
    def gathering(self) -> frozenset[str]: ...


class UpgradeLoop:
    """Runs the upgrades.

    A canary is an extra group that gets a new revision first. `on_shares` is called with the
    canaries' shares of the requests. `leadership` returns whether this process leads now, and its
    epoch.
    """

    def __init__(
        self,
        groups: GroupReconciler,
        plans: Plans,
        publisher: EventPublisher,
        leadership: Callable[[], tuple[bool, int]],
        on_shares: Callable[[Mapping[str, float]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._groups, self._view, self._plans = groups, groups.view, plans
        self._publisher, self._leadership, self._clock = publisher, leadership, clock
        self._on_shares = on_shares
        self._epoch = 0
        self.seen_version = 0  # the version of the desired state that `reports` reflect
        self._controller = UpgradeController(KV_TRANSPORT)
        self._lost_versions: set[int] = set()
        self._deciding = asyncio.Lock()  # held from reading a record until its change is written
        groups.on_step = self._on_step

    @property
    def reports(self) -> list[UpgradeReport]:
        """Reports on upgrades that run or were rolled back, ordered by scenario."""
        return [report for _, report in sorted(self._controller.reports.items())]

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            try:
                await self.round()
            except (Unavailable, NotLeader, VersionConflict) as exc:
                log.info("upgrades.unavailable", error=exc.message)
            except Exception:  # a bug here must not end the planning of requests
                log.exception("upgrades.bug")
            await asyncio.sleep(_TICK_S)

    async def round(self) -> None:
        """Read, decide and write, if this master leads and its reconciler is not paused."""
        # Masters that do not lead need the shares as well, in case they become the leader.
        self._on_shares(shares(self._view.upgrades.values()))
        async with self._deciding:
            await self._look()

    async def _look(self) -> None:
        is_leader, epoch = self._leadership()
        current, observed = self._groups.current, self._groups.observed
        version = self._view.version
        if not is_leader or current is None or version is None or observed is None:
            return
        if (observed.epoch, observed.version) != (epoch, version.version):
            return  # the reconciler has not read this version yet
        if epoch != self._epoch:  # the controller's times from an earlier leadership are too old
            self._epoch, self._controller = epoch, UpgradeController(KV_TRANSPORT)
            self.seen_version = 0
        asked, known = current
        look = observe(
            asked,
            adjusted(asked, known),
            self._view.upgrades,
            observed,
            self._groups.controller.reports,
            Surroundings(
                self._plans.busy,
                self._faulty(),
                self._plans.planning(),
                self._plans.gathering(),
                version.canary_share,
                frozenset(self._lost_versions),
            ),
        )
        await self._carry_out(self._controller.handle(look, self._clock()))
        self.seen_version = observed.version

    async def promote(self, scenario: str) -> dict[str, float]:
        """Give a canary's revision to all groups of its scenario.

        An empty `scenario` means all scenarios with a canary. Returns the share that each canary
        had, by scenario.
        """
        async with self._deciding:  # a canary that is being rolled back must not be promoted
            chosen: list[Upgrade] = [
                each
                for name, each in sorted(self._view.upgrades.items())
                if each.canary_share and scenario in ("", name)
            ]
            shares = {each.scenario: each.canary_share for each in chosen}
            now = self._clock()
            effects = [e for each in chosen for e in self._controller.handle(Promoted(each), now)]
            await self._carry_out(effects)
        return shares

    def tell(self, event: RequestAnswered | LegFailureReported) -> None:
        """Note that an instance of a revision answered a request or failed a leg."""
        self._controller.handle(event, self._clock())

    def _on_step(self, step: AnnounceStep) -> None:
        observed = self._groups.observed
        if step.step not in _FAULTY_STEPS or not step.instance_id or observed is None:
            return
        given = observed.given.get(step.instance_id) or _first_rank(step.instance_id, observed)
        if given is not None and given.assignment_id == step.assignment_id:
            group_revision = (step.group_id, given.role_spec.revision)
            self._controller.handle(MemberLost(group_revision, step.instance_id), self._clock())

    def _faulty(self) -> Mapping[GroupRevision, Mapping[str, str]]:
        """The instances with a fault of any level that has a reason other than hardware.

        The result maps each group and revision to its faulty instances, with a reason for each.
        """
        found: dict[GroupRevision, dict[str, str]] = {}
        for instance in self._view.fleet.instances.values():
            fault = instance.fault
            own = [r for r in fault.reasons if not r.startswith(_OF_HARDWARE)] if fault else []
            if own and fault is not None and fault.level:
                group_revision = (instance.identity.group_id, instance.identity.revision)
                found.setdefault(group_revision, {})[instance.id] = own[0]
        return found

    async def _carry_out(self, effects: Sequence[Effect]) -> None:
        """Write the records, and then the versions and events that depend on the records."""
        await self._keep(effects)
        for effect in effects:
            match effect:
                case RestoreVersion():
                    await self._restore(effect)
                case AnnounceUpgradeStep():
                    await self._tell(effect)

    async def _keep(self, effects: Sequence[Effect]) -> None:
        upgrades = dict(self._view.upgrades)
        for effect in effects:
            match effect:
                case KeepRecord(upgrade):
                    upgrades[upgrade.scenario] = upgrade
                case DropRecord(scenario):
                    upgrades.pop(scenario, None)
        if upgrades == self._view.upgrades:
            return
        is_leader, epoch = self._leadership()
        if not is_leader:
            raise NotLeader("this master has just lost the lead")
        message = upgrades_to(upgrades, epoch)
        # The records are still current, because nothing was awaited since they were read.
        await self._view.desired.keep_upgrades(message)
        self._on_shares(shares(upgrades.values()))

    async def _restore(self, effect: RestoreVersion) -> None:
        """Write an earlier version of the desired state as the newest one.

        If a write fails, the next round tries again. A version that no longer exists or cannot be
        read is not tried again.
        """
        before = await self._view.desired.version(effect.version)
        if before is None or not await asyncio.to_thread(_can_read, before.text):
            log.warning("upgrade.version_lost", version=effect.version)
            self._lost_versions.add(effect.version)
            return
        applied = await self._view.desired.apply(
            before.text, expected_version=effect.bad, author=_AUTHOR, reason=effect.reason
        )
        log.warning(
            "upgrade.restored",
            version=applied.version,
            restored_version=effect.version,
            reason=effect.reason,
        )

    async def _tell(self, told: AnnounceUpgradeStep) -> None:
        _steps.add(1, {names.ATTR_STEP: told.step})
        log.info(
            "upgrade.step",
            scenario=told.scenario,
            step=told.step,
            group_id=told.group_id,
            version=told.version,
            reason=told.reason,
        )
        await self._publisher.publish(
            subjects.upgrade_step(told.scenario),
            UpgradeStep(
                scenario=told.scenario,
                step=told.step,
                group_id=told.group_id,
                version=told.version,
                reason=told.reason,
                epoch=self._epoch,
            ),
        )


def _can_read(text: str) -> bool:
    """Whether this text is a valid desired state for this release."""
    try:
        read(text)
    except InvalidRequest:
        return False
    return True


_steps = metrics.counter(
    names.UPGRADE_STEPS,
    "Steps of upgrades, by kind",
    known=[{names.ATTR_STEP: step} for step in get_args(UpgradeStepKind)],
)


def _first_rank(domain_id: str, observed: Observed) -> Assignment | None:
    """The assignment of the first instance of a domain (data-parallel group)."""
    return next(
        (
            given
            for _, given in sorted(observed.given.items())
            if (domain := given.role_spec.domain) is not None and domain.domain_id == domain_id
        ),
        None,
    )
