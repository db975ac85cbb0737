"""Decides when a schedule adds, removes, lends or reclaims groups (S11, S21).

Each entry of a schedule has a cron expression, and fires once for each time of that expression. The
plan of an entry is treated like an operator's plan. It waits for a plan under way, and its moves
are checked by the same rules.

If no master was running at an entry's time, the next master fires the entry late, within the
entry's grace. After that it only reports the missed time. A pool borrows groups, and a RECLAIM
takes them back. A RECLAIM begins before its entry's time, by its lead, so that the groups serve in
time. If less than the lead is left when a RECLAIM is added, it begins at once.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, tzinfo
from typing import Final

from pdmesh.core.model import Role
from pdmesh.core.moves.cron import Cron
from pdmesh.core.moves.move import (
    TRAINING_POOL,
    Groups,
    GroupShape,
    Move,
    MoveKind,
    MovePlan,
    Trigger,
    serving,
)

MAX_ENTRIES: Final = 1000
_MAX_AHEAD_S: Final = 86_400.0  # if the clock is set back by less than this, nothing fires twice
_LEAD_MARGIN: Final = 1.5  # a RECLAIM allows this many times the slowest recent set-up


class ScheduleAction(enum.StrEnum):
    ADD = "add"  # brings back groups of the desired state that a REMOVE took away
    REMOVE = "remove"  # takes groups away, and frees their instances for other groups
    LEND = "lend"  # lends groups to a pool, from which RECLAIM takes them back
    RECLAIM = "reclaim"  # takes lent groups back, early enough to serve at the entry's time


_BRINGS: Final = (ScheduleAction.RECLAIM, ScheduleAction.ADD)


@dataclass(frozen=True, slots=True)
class ScheduleEntry:
    """What to do to `num_groups` of `scenario` at each time of `cron`.

    The groups of a RECLAIM serve at that time. Its work begins earlier.
    """

    name: str
    scenario: str
    cron: Cron
    what: ScheduleAction
    num_groups: int
    pool: str = TRAINING_POOL
    zone: tzinfo = UTC
    grace_s: float = 900.0


@dataclass(frozen=True, slots=True)
class DueEntry:
    """An entry has fired.

    `late_s` says how long ago it should have begun. If `plan` is None, nothing is done, and
    `reason` says why.
    """

    entry: ScheduleEntry
    at: float  # the time that it fired for, in unix seconds
    late_s: float
    plan: MovePlan | None
    reason: str


@dataclass(slots=True)
class Schedule:
    """All entries of a schedule, and which times they have fired for.

    `fired` has the last time, in unix seconds, that each entry fired for. Store it where the next
    leader finds it. A RECLAIM begins `lead_s` before its time, or earlier if recent set-ups took
    longer. A new entry fires for times after its first tick.
    """

    entries: Sequence[ScheduleEntry]
    lead_s: float = 300.0
    fired: dict[str, float] = field(default_factory=dict)
    # The slowest recent set-up, by scenario.
    _setups_s: dict[str, float] = field(default_factory=dict)
    # By entry: a time, and the next time of the cron expression after it. They are cached because
    # the search may take a millisecond.
    _following: dict[str, tuple[float, float | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [entry.name for entry in self.entries]
        if len(names) > MAX_ENTRIES:
            raise ValueError(f"{len(names)} schedules are more than {MAX_ENTRIES}")
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"schedule {twice!r} is there twice")

    def replace_entries(self, entries: Sequence[ScheduleEntry]) -> None:
        """The desired state changed. Entries that stay keep the last time that they fired for."""
        fresh = Schedule(entries)
        self.entries, self._following = fresh.entries, {}
        self.fired = {e.name: self.fired[e.name] for e in entries if e.name in self.fired}

    def set_up_took(self, scenario: str, seconds: float) -> None:
        """The set-up of a group took `seconds`. Later reclaims must begin early enough for this."""
        before = self._setups_s.get(scenario, 0.0)
        self._setups_s[scenario] = max(seconds, 0.8 * before)

    def lead_of(self, entry: ScheduleEntry) -> float:
        """How many seconds before its time an entry acts."""
        if entry.what is not ScheduleAction.RECLAIM:
            return 0.0
        return max(self.lead_s, _LEAD_MARGIN * self._setups_s.get(entry.scenario, 0.0))

    def tick(self, groups: Groups, now: float) -> list[DueEntry]:
        """Fire the entries that are due. Entries that add or reclaim groups come first.

        `now` is in unix seconds. `groups` has the groups as they will be after earlier plans
        (`PlanRunner.expected`).
        """
        due: list[DueEntry] = []
        taken: set[str] = set()
        for entry in sorted(self.entries, key=lambda e: (e.what not in _BRINGS, e.name)):
            self._note_start(entry, now)
            at = self._latest(entry, now)
            if at is None:
                continue
            self.fired[entry.name] = at
            due.append(self._fire(entry, at, groups, taken, now))
        return due

    def _note_start(self, entry: ScheduleEntry, now: float) -> None:
        """Let a new entry fire only for times after now.

        Do the same for an entry that fired for a time far ahead because the wall clock was wrong.
        """
        horizon = now + self.lead_of(entry)
        fired = self.fired.setdefault(entry.name, now)
        following = entry.cron.next_after(horizon, entry.zone) if fired > horizon else None
        if following is not None and fired - following > _MAX_AHEAD_S:
            self.fired[entry.name] = now

    def _latest(self, entry: ScheduleEntry, now: float) -> float | None:
        """The latest time that is due and has not fired. Several missed times fire once."""
        horizon = now + self.lead_of(entry)
        latest, at = None, self._next_of(entry)
        if at is not None and horizon - at > 86_400:
            at = entry.cron.next_after(max(at - 1, horizon - 86_400), entry.zone) or at
        while at is not None and at <= horizon:
            latest, at = at, entry.cron.next_after(at, entry.zone)
        return latest

    def _next_of(self, entry: ScheduleEntry) -> float | None:
        """The first time after the last one that the entry fired for."""
        fired = self.fired[entry.name]
        known = self._following.get(entry.name)
        if known is None or known[0] != fired:
            known = self._following[entry.name] = (
                fired,
                entry.cron.next_after(fired, entry.zone),
            )
        return known[1]

    def _fire(
        self, entry: ScheduleEntry, at: float, groups: Groups, taken: set[str], now: float
    ) -> DueEntry:
        late_s = max(0.0, now + self.lead_of(entry) - at)
        if (missed_s := now - at) > entry.grace_s:
            return DueEntry(
                entry, at, late_s, None, f"missed by {missed_s:.0f} s: no master was running"
            )
        reason = f"schedule {entry.name}"
        moves = tuple(_moves(entry, groups, taken, reason))
        taken.update(move.group_id for move in moves)
        if not moves:
            return DueEntry(entry, at, late_s, None, f"no group to {entry.what.value}")
        plan = MovePlan(entry.scenario, Trigger.SCHEDULE, moves, reason, asked_at=now)
        return DueEntry(entry, at, late_s, plan, reason)


def _moves(entry: ScheduleEntry, groups: Groups, taken: Iterable[str], reason: str) -> list[Move]:
    match entry.what:
        case ScheduleAction.LEND | ScheduleAction.REMOVE:
            own = [g for g in serving(groups, entry.scenario) if g.group_id not in taken]
            chosen = _least_busy(own, entry.num_groups)
            return [Move(g.group_id, MoveKind.LEND, None, entry.pool, reason) for g in chosen]
        case ScheduleAction.RECLAIM | ScheduleAction.ADD:
            lent = [
                group_id
                for group_id in sorted(groups)
                if groups[group_id].scenario == entry.scenario
                and groups[group_id].pool == entry.pool
                and group_id not in taken
            ]
            return [Move(i, MoveKind.RECLAIM, None, None, reason) for i in lent[: entry.num_groups]]


def _least_busy(groups: Sequence[GroupShape], count: int) -> list[GroupShape]:
    """The least busy groups. Of equally busy groups, the last ones by id are chosen.

    A group whose load is unknown counts as fully busy.
    """

    def load(group: GroupShape) -> float:
        roles = (r for r in (Role.PREFILL, Role.DECODE, Role.FUSION) if group.num(r))
        known = (group.busy(role) for role in roles)
        return max((1.0 if busy is None else busy for busy in known), default=1.0)

    by_age = sorted(groups, key=lambda g: g.group_id, reverse=True)
    return sorted(by_age, key=load)[:count]
