"""Watches the group that an upgrade changes: how long it was complete, incidents, answers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from pdmesh.core.groups.desired import UpgradeLimits
from pdmesh.core.upgrade.events import GroupSeen, MemberLost
from pdmesh.core.upgrade.revision_health import (
    Answers,
    Cell,
    LegFailureReported,
    RequestAnswered,
    verdict,
)

_BEFORE_S: Final = 300.0  # answers before a change that it is compared with


@dataclass(slots=True)
class Watch:
    """One group since it was given a revision."""

    cell: Cell
    since: float
    unwhole_since: float | None
    whole_since: float | None = None
    lacking_since: float | None = None
    incidents: dict[str, str] = field(default_factory=dict)  # by instance

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
        self.incidents.update(seen.unwell)


@dataclass(slots=True)
class Watches:
    """One watch for each scenario, and how every group answers."""

    _answers: Answers = field(default_factory=Answers)
    _watches: dict[str, Watch] = field(default_factory=dict)  # by scenario

    def heard(self, event: RequestAnswered | LegFailureReported, now: float) -> None:
        self._answers.handle(event, now)

    def lost(self, event: MemberLost) -> None:
        for watch in self._watches.values():
            if watch.cell == event.cell:
                watch.incidents[event.instance_id] = "it was lost"

    def forget(self, scenario: str) -> None:
        """The next watch begins anew, even for the same group with the same revision."""
        self._watches.pop(scenario, None)

    def keep_only(self, scenarios: Iterable[str]) -> None:
        self._watches = {s: self._watches[s] for s in scenarios if s in self._watches}

    def watch(self, scenario: str, cell: Cell, now: float) -> Watch:
        """The present watch, or a new one if the group or its revision is another."""
        watch = self._watches.get(scenario)
        if watch is None or watch.cell != cell:
            watch = self._watches[scenario] = Watch(cell, now, now)
        return watch

    def why_slow_or_failing(
        self,
        watch: Watch,
        controls: Iterable[Cell],
        before: Cell,
        limits: UpgradeLimits,
        now: float,
    ) -> str:
        until = now + 1.0
        new = self._answers.of([watch.cell], watch.since, until)
        old = self._answers.of(list(controls), watch.since, until)
        if not old.num:
            old = self._answers.of([before], watch.since - _BEFORE_S, watch.since)
        return verdict(new, old, limits)
