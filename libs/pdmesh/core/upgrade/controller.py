"""Decides which group gets a new revision next, and when all groups roll back (S24).

A revision is a name for a service's model, KV layout and transport. A scenario is a kind of
requests with its own groups of instances. These groups get a new revision one after another, and
keep their ratio of prefills to decodes. Each round compares the services that the groups run with
the desired state, and decides the next state of the upgrade, its record. The records are stored
beside the desired state, so a new leader continues an upgrade. The controller keeps only times,
answers and incidents in memory. The rules are:

- Only one group over all scenarios changes at a time, and only while the others can carry the
  scenario's requests. Groups that do not serve get the revision after the others have proved it.
- A group has proved the revision when it was complete and served well for a while. If one group
  fails, all groups roll back, one at a time. The previous desired state returns, as a new version.
- A canary is a small group beside the others. It gets a share of the requests until an operator
  promotes the upgrade. Then the other groups get the revision.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from pdmesh.core.flight_recorder import FlightRecorder, recorded
from pdmesh.core.groups.revisions import Upgrade, canary_of
from pdmesh.core.upgrade.events import (
    AnnounceUpgradeStep,
    DropRecord,
    Effect,
    Event,
    GroupsObserved,
    KeepRecord,
    MemberLost,
    Promoted,
    UpgradeReport,
)
from pdmesh.core.upgrade.revision_health import LegFailureReported, RequestAnswered
from pdmesh.core.upgrade.rollout import decide
from pdmesh.core.upgrade.round import UpgradeRound
from pdmesh.core.upgrade.trial import Trials


@dataclass(slots=True)
class UpgradeController:
    """Changes its state only in `handle`.

    The caller must write the records that `handle` returns, and pass all records to the next round.
    """

    kv_transport: str
    reports: dict[str, UpgradeReport] = field(default_factory=dict)
    _trials: Trials = field(default_factory=Trials)
    recorder: FlightRecorder = field(default_factory=FlightRecorder, repr=False, compare=False)

    @recorded
    def handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case RequestAnswered() | LegFailureReported():
                self._trials.heard(event, now)
                return []
            case MemberLost():
                self._trials.lost(event)
                return []
            case Promoted(upgrade):
                return self._on_promoted(upgrade)
            case GroupsObserved():
                return self._on_observed(event, now)

    def _on_promoted(self, upgrade: Upgrade) -> list[Effect]:
        if not upgrade.canary_share:
            return []
        told = AnnounceUpgradeStep(
            upgrade.scenario, "promoted", upgrade.version, canary_of(upgrade.scenario)
        )
        return [KeepRecord(replace(upgrade, canary_share=0.0)), told]

    def _on_observed(self, observed: GroupsObserved, now: float) -> list[Effect]:
        effects: list[Effect] = []
        known = dict(observed.upgrades)
        taken = {scenario for scenario, each in known.items() if each.current}
        self.reports = {}
        # Upgrades under way come first, because the others wait for them.
        for scenario in sorted(
            observed.targets, key=lambda s: (s not in known or not known[s].current, s)
        ):
            before, is_taken = known.get(scenario), bool(taken - {scenario})
            round_ = UpgradeRound(
                self.kv_transport, self._trials, observed, scenario, is_taken, now
            )
            after = decide(round_, before)
            if after != before:
                effects.append(KeepRecord(after))
                known[scenario] = after
                (taken.add if after.current else taken.discard)(scenario)
            effects += round_.effects
            if round_.report is not None:
                self.reports[scenario] = round_.report
        effects += [DropRecord(s) for s in sorted(known.keys() - observed.targets.keys())]
        self._trials.keep_only(observed.targets)
        return effects
