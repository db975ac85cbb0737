"""Rolling upgrades: one group after another gets the new revision, its ratio unchanged, and proves itself before the next (S24).

Level-triggered: each look compares what the scenarios' groups run with what the desired state asks for, and says which record to keep
next. So a new leader takes an upgrade up where it is; kept here are only times and what went wrong meanwhile. The rules:

- One group at a time, over all scenarios, and only while those that are left can carry the scenario's requests. Groups that serve
  nothing get what the others have proved, when these are done.
- A group counts as done when it served whole and well for a while. If it does not, all groups go back, one at a time, and the
  desired state with them, as a new version.
- A canary is a small group of its own beside the others. It gets a share of the requests until somebody promotes it.
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
    """The only way to change state is `handle`. A record that is to be kept counts from the next look on, if it was written."""

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
