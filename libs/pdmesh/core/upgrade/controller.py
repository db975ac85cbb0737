"""Decides which group gets a new revision next, and when all roll back (S24).

One group after another gets the revision, its ratio unchanged, and proves itself before the next
one. Level-triggered: each look compares what the scenarios' groups run with what the desired state
asks for, and says which record to keep next. So a new leader takes up an upgrade where it is. Only
times, and what went wrong meanwhile, are kept here. The rules:

- Only one group over all scenarios changes at a time, and only while the others can carry the
  scenario's requests. Groups that serve nothing get the revision when the others have proved it.
- A group has proved itself when it served complete and well for a while. If it does not, all groups
  roll back, one at a time, and so does the desired state, as a new version.
- A canary is a small group beside the others. It gets a share of the requests until it is promoted.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from pdmesh.core.groups.revisions import Upgrade, canary_of
from pdmesh.core.upgrade.events import (
    Drop,
    Effect,
    Event,
    Keep,
    Looked,
    MemberLost,
    Promoted,
    Told,
    UpgradeReport,
)
from pdmesh.core.upgrade.revision_health import LegFailureReported, RequestAnswered
from pdmesh.core.upgrade.step import Turn
from pdmesh.core.upgrade.trial import Watches


@dataclass(slots=True)
class UpgradeController:
    """The only way to change state is `handle`.

    A record to keep counts from the next look on, if it was written.
    """

    kv_transport: str
    reports: dict[str, UpgradeReport] = field(default_factory=dict)
    _watches: Watches = field(default_factory=Watches)

    def handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case RequestAnswered() | LegFailureReported():
                self._watches.heard(event, now)
                return []
            case MemberLost():
                self._watches.lost(event)
                return []
            case Promoted(upgrade):
                return self._on_promoted(upgrade)
            case Looked():
                return self._on_looked(event, now)

    def _on_promoted(self, upgrade: Upgrade) -> list[Effect]:
        if not upgrade.canary_share:
            return []
        told = Told(upgrade.scenario, "promoted", upgrade.version, canary_of(upgrade.scenario))
        return [Keep(replace(upgrade, canary_share=0.0)), told]

    def _on_looked(self, look: Looked, now: float) -> list[Effect]:
        effects: list[Effect] = []
        known = dict(look.upgrades)
        taken = {scenario for scenario, each in known.items() if each.current}
        self.reports = {}
        # Those under way first: the others wait for them.
        for scenario in sorted(
            look.targets, key=lambda s: (s not in known or not known[s].current, s)
        ):
            is_taken = bool(taken - {scenario})
            before = known.get(scenario)
            turn = Turn(self.kv_transport, self._watches, look, scenario, before, is_taken, now)
            after, told = turn.decide()
            if after != known.get(scenario):
                effects.append(Keep(after))
                known[scenario] = after
                (taken.add if after.current else taken.discard)(scenario)
            effects += told
            if turn.report is not None:
                self.reports[scenario] = turn.report
        for scenario in sorted(known.keys() - look.targets.keys()):
            effects.append(Drop(scenario))
        self._watches.keep_only(look.targets)
        return effects
