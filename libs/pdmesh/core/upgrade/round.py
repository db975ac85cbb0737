"""The input and the results of one round of a scenario's upgrade.

A scenario is a kind of requests. A round compares the services that the scenario's groups of
instances run with the desired state. `UpgradeRound` has the input of the round, and collects its
effects and its report.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from pdmesh.core.groups.desired import Service, UpgradeLimits, revision_of
from pdmesh.core.groups.revisions import Upgrade
from pdmesh.core.upgrade.events import (
    AnnounceUpgradeStep,
    Effect,
    GroupSeen,
    GroupsObserved,
    UpgradeReport,
    UpgradeStepKind,
)
from pdmesh.core.upgrade.trial import Trial, Trials


@dataclass(slots=True)
class UpgradeRound:
    kv_transport: str
    trials: Trials
    observed: GroupsObserved
    scenario: str
    is_taken: bool  # a group of another scenario is changing
    now: float
    report: UpgradeReport | None = None
    effects: list[Effect] = field(default_factory=list)

    @property
    def groups(self) -> list[GroupSeen]:
        """The scenario's groups without the canary."""
        return self.observed.serving(self.scenario)

    @property
    def limits(self) -> UpgradeLimits:
        return self.observed.limits_of(self.scenario)

    def revision(self, service: Service) -> str:
        return revision_of(service, self.kv_transport)

    def trial(self, group_id: str, service: Service) -> Trial:
        return self.trials.trial(self.scenario, (group_id, self.revision(service)), self.now)

    def change(self, upgrade: Upgrade, group: GroupSeen) -> Upgrade:
        """Give the group the service of `upgrade.goal`, and begin its trial."""
        after = replace(upgrade.moved(group.group_id), current=group.group_id)
        self.trials.forget(self.scenario)
        self.trial(group.group_id, after.goal)  # the trial must begin before the first answer
        self.announce("changing", after, group.group_id, upgrade.back)
        self.say(after, "going back" if upgrade.back else "changing", group.group_id)
        return after

    def announce(
        self, step: UpgradeStepKind, upgrade: Upgrade, group_id: str = "", reason: str = ""
    ) -> None:
        self.effects.append(
            AnnounceUpgradeStep(self.scenario, step, upgrade.version, group_id, reason)
        )

    def say(self, upgrade: Upgrade, state: str, detail: str) -> None:
        """Set the report for operators. A later call in the same round replaces it."""
        is_changed = [upgrade.service_of(g.group_id) == upgrade.goal for g in self.groups]
        self.report = UpgradeReport(
            self.scenario, upgrade.version, state, detail, sum(is_changed), len(is_changed)
        )

    def not_whole(self) -> str:
        """The groups that are not complete, as the end of a sentence, or empty if all are."""
        found = [f"{g.group_id}: {g.detail}".rstrip(": ") for g in self.groups if not g.is_whole]
        return f"; not whole yet: {', '.join(found)}" if found else ""
