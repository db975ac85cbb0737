"""A rolling upgrade of a scenario: one group after another gets the new revision, with its ratio unchanged (S24).

At most one group is out at any time, and only if the others can carry its traffic. A group counts as done when it serves the new
revision with as many instances of each role as it is meant to have, and stayed healthy for a while. If it does not, that group
goes back to its revision and the upgrade stops; groups that were done stay, since they proved themselves.
With a canary share, the first group takes only that part of its traffic until it has proved itself.

Played by simulations only: the master changes revisions by `group_controller`'s own rule (ADR 0017).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pdmesh.core.moves import MIN_PER_GROUP


@dataclass(frozen=True, slots=True)
class GroupSeen:
    """`revision`: of all that serve, empty if they differ or none does. `is_whole`: all wanted instances of both roles serve.

    `busy`: of the busier role, 0..1; `error_share`: of requests that ended lately; None: not known. `failure`: why it cannot
    be set up, as its controller says.
    """

    group_id: str
    revision: str
    is_whole: bool
    busy: float | None
    error_share: float | None = None
    failure: str = ""


@dataclass(frozen=True, slots=True)
class UpgradeLimits:
    """`soak_s`: of health that proves a group; `group_timeout_s`: from its change to being whole."""

    soak_s: float = 60.0
    group_timeout_s: float = 900.0
    max_error_share: float = 0.01
    max_busy: float = 0.85
    canary_share: float = 0.0  # of a group's usual traffic; 0: no canary


@dataclass(frozen=True, slots=True)
class SetRevision:
    group_id: str
    revision: str
    reason: str


@dataclass(frozen=True, slots=True)
class SetShare:
    """Of the traffic that the group would have; 1.0 is normal."""

    group_id: str
    share: float


class UpgradeState(enum.StrEnum):
    RUNNING = "running"
    DONE = "done"
    ROLLING_BACK = "rolling back"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class UpgradeEnded:
    state: UpgradeState
    num_done: int
    reason: str


Effect = SetRevision | SetShare | UpgradeEnded


@dataclass(slots=True)
class Upgrade:
    """Tick it with what is seen of the scenario's groups. `before`: the revision of each group, in the order to take them.

    A new one with the same arguments goes on where another stopped: what is done is read from the groups.
    """

    revision: str
    before: Mapping[str, str]
    limits: UpgradeLimits = field(default_factory=UpgradeLimits)
    state: UpgradeState = UpgradeState.RUNNING
    current: str | None = None
    reason: str = ""
    waits_for: str = ""  # why nothing goes on, for the page
    _done: list[str] = field(default_factory=list)
    _changed_at: float = 0.0
    _healthy_since: float | None = None

    @property
    def done(self) -> Sequence[str]:
        return tuple(self._done)

    def tick(self, groups: Mapping[str, GroupSeen], now: float) -> list[Effect]:
        match self.state:
            case UpgradeState.RUNNING:
                return self._watch(groups, now) if self.current else self._next(groups, now)
            case UpgradeState.ROLLING_BACK:
                return self._watch_rollback(groups)
            case _:
                return []

    def stop(self, reason: str, now: float) -> list[Effect]:
        """An operator wants no more of it: the group under way goes back."""
        if self.state is not UpgradeState.RUNNING:
            return []
        if self.current is None:
            return self._end(UpgradeState.STOPPED, reason)
        return self._roll_back(reason, now)

    # --- one group ---------------------------------------------------------------------------------

    def _next(self, groups: Mapping[str, GroupSeen], now: float) -> list[Effect]:
        self._skip_done(groups)
        left = [g for g in self.before if g not in self._done and g in groups]
        if not left:
            return self._end(UpgradeState.DONE, "")
        chosen = next((g for g in left if groups[g].revision == self.revision), left[0])
        is_resumed = groups[chosen].revision == self.revision or not groups[chosen].is_whole
        self.waits_for = "" if is_resumed else self._why_wait(chosen, groups)
        if self.waits_for:
            return []
        self.current, self._changed_at, self._healthy_since = chosen, now, None
        change = SetRevision(chosen, self.revision, f"upgrade to {self.revision}")
        if self.limits.canary_share and not self._done:
            return [SetShare(chosen, self.limits.canary_share), change]
        return [change]

    def _skip_done(self, groups: Mapping[str, GroupSeen]) -> None:
        """Groups that serve the revision already, as after a change of the leader, or that were set up with it."""
        for group_id in self.before:
            seen = groups.get(group_id)
            is_new = seen is not None and seen.revision == self.revision and seen.is_whole
            if is_new and group_id not in self._done and not self.limits.canary_share:
                self._done.append(group_id)

    def _why_wait(self, group_id: str, groups: Mapping[str, GroupSeen]) -> str:
        others = [g for i, g in groups.items() if i != group_id]
        if len(others) < MIN_PER_GROUP:
            return f"{group_id} is the only group: set up another first"
        if broken := next((g.group_id for g in others if not g.is_whole), None):
            return f"group {broken} is not whole"
        seen = [groups[group_id], *others]
        busy = [g.busy for g in seen if g.busy is not None]
        if len(busy) < len(seen):
            return "the groups' load is unknown"
        if (carried := sum(busy) / len(others)) > self.limits.max_busy:
            return f"{len(others)} groups would be {carried:.0%} busy"
        return ""

    def _watch(self, groups: Mapping[str, GroupSeen], now: float) -> list[Effect]:
        assert self.current is not None
        seen = groups.get(self.current)
        if seen is None:
            return self._end(UpgradeState.STOPPED, f"group {self.current} is gone")
        if seen.failure:
            return self._roll_back(f"{self.current}: {seen.failure}", now)
        if seen.revision != self.revision or not seen.is_whole:
            return self._while_changing(now)
        if seen.error_share is not None and seen.error_share > self.limits.max_error_share:
            return self._roll_back(
                f"{self.current}: {seen.error_share:.1%} of requests failed", now
            )
        if self._healthy_since is None:
            self._healthy_since = now
        if now - self._healthy_since < self.limits.soak_s:
            return []
        return self._proved(self.current)

    def _while_changing(self, now: float) -> list[Effect]:
        if self._healthy_since is not None:
            return self._roll_back(f"{self.current} did not stay whole", now)
        if now - self._changed_at > self.limits.group_timeout_s:
            return self._roll_back(f"{self.current} was not whole in time", now)
        return []

    def _proved(self, group_id: str) -> list[Effect]:
        was_canary = bool(self.limits.canary_share) and not self._done
        self._done.append(group_id)
        self.current = None
        return [SetShare(group_id, 1.0)] if was_canary else []

    # --- the end -----------------------------------------------------------------------------------

    def _roll_back(self, reason: str, now: float) -> list[Effect]:
        assert self.current is not None
        self.state, self.reason, self._changed_at = UpgradeState.ROLLING_BACK, reason, now
        back = SetRevision(self.current, self.before[self.current], f"rolled back: {reason}")
        if self.limits.canary_share and not self._done:
            return [back, SetShare(self.current, 1.0)]
        return [back]

    def _watch_rollback(self, groups: Mapping[str, GroupSeen]) -> list[Effect]:
        """The group's own controller keeps trying: only being whole again ends it."""
        assert self.current is not None
        seen = groups.get(self.current)
        if seen is not None and not (seen.is_whole and seen.revision == self.before[self.current]):
            return []
        self.current = None
        return self._end(UpgradeState.STOPPED, self.reason)

    def _end(self, state: UpgradeState, reason: str) -> list[Effect]:
        self.state, self.reason, self.waits_for = state, reason, ""
        return [UpgradeEnded(state, len(self._done), reason)]
