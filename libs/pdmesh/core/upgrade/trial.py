"""The trial of a group that an upgrade has changed to another revision.

A revision names a version of model, KV layout and transport. A trial notes since when the group is
complete, and which of its instances were lost or faulty. It also compares the group's answers with
those of the old revision.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from pdmesh.core.groups.desired import UpgradeLimits
from pdmesh.core.upgrade.events import GroupSeen, MemberLost
from pdmesh.core.upgrade.revision_health import (
    Answers,
    GroupRevision,
    LegFailureReported,
    RequestAnswered,
    why_worse,
)

# The old revision is judged by its answers in this period before the change.
_BEFORE_S: Final = 300.0


@dataclass(slots=True)
class Trial:
    """The trial of one group. The group is whole when it is complete and serves."""

    group_revision: GroupRevision
    since: float  # when the group got the revision
    unwhole_since: float | None
    whole_since: float | None = None
    # When the group began to lack only blank instances, which have no role.
    lacking_since: float | None = None
    incidents: dict[str, str] = field(default_factory=dict)  # reason by lost or faulty instance

    def note(self, seen: GroupSeen, now: float) -> None:
        if seen.is_whole:
            self.unwhole_since = None
            self.whole_since = now if self.whole_since is None else self.whole_since
        else:
            self.whole_since = None
            self.unwhole_since = now if self.unwhole_since is None else self.unwhole_since
        if not seen.is_lacking:
            self.lacking_since = None
        elif self.lacking_since is None:
            self.lacking_since = now
        self.incidents.update(seen.faulty)


@dataclass(slots=True)
class Trials:
    """The current trial of each scenario, and the answers of all groups."""

    _answers: Answers = field(default_factory=Answers)
    _trials: dict[str, Trial] = field(default_factory=dict)  # by scenario

    def heard(self, event: RequestAnswered | LegFailureReported, now: float) -> None:
        self._answers.handle(event, now)

    def lost(self, event: MemberLost) -> None:
        for trial in self._trials.values():
            if trial.group_revision == event.group_revision:
                trial.incidents[event.instance_id] = "it was lost"

    def forget(self, scenario: str) -> None:
        """Drop the scenario's trial, so that the next one begins with no history."""
        self._trials.pop(scenario, None)

    def keep_only(self, scenarios: Iterable[str]) -> None:
        self._trials = {s: self._trials[s] for s in scenarios if s in self._trials}

    def trial(self, scenario: str, group_revision: GroupRevision, now: float) -> Trial:
        """The scenario's trial, or a new one if the current one has another group or revision."""
        trial = self._trials.get(scenario)
        if trial is None or trial.group_revision != group_revision:
            trial = self._trials[scenario] = Trial(group_revision, now, now)
        return trial

    def why_slow_or_failing(
        self,
        trial: Trial,
        controls: Iterable[GroupRevision],
        before: GroupRevision,
        limits: UpgradeLimits,
        now: float,
    ) -> str:
        until = now + 1.0
        new = self._answers.of([trial.group_revision], trial.since, until)
        old = self._answers.of(list(controls), trial.since, until)
        if not old.num:
            old = self._answers.of([before], trial.since - _BEFORE_S, trial.since)
        return why_worse(new, old, limits)
