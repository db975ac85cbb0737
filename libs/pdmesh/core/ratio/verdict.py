"""Decides whether a ratio move helped or is undone, and how long the verdict holds (S28).

The windows after a move are compared with the windows that led to it. A move is undone only for
harm that was seen: less success, slower answers, or fewer answers per second while requests
wait. Then the same role gets no more instances for a while. After a good move, the other role gets
no instances for a while.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pdmesh.core.model import Role
from pdmesh.core.moves.move import Move, other
from pdmesh.core.ratio.bottleneck import Window


@dataclass(frozen=True, slots=True)
class VerdictLimits:
    num_windows: int = 3
    max_success_drop: float = 0.02
    max_e2e_rise: float = 0.10  # of the mean, unless more requests come than before the move
    # If requests spend this share of E2E at the gateway, more come than can be answered.
    waiting: float = 0.25
    max_pace_drop: float = 0.05  # of answers per second, if requests wait


@dataclass(frozen=True, slots=True)
class Verdict:
    """`harm`: why the move is undone; if empty, it stays."""

    harm: str
    e2e_text: str


@dataclass(slots=True)
class MoveTrial:
    """One move, from its plan until `judge` returns a verdict.

    `before`: the windows that led to it; `rate_per_s`: requests that came then.
    """

    move: Move
    short_of: Role
    before: Sequence[Window]
    rate_per_s: float
    limits: VerdictLimits
    _after: list[Window] = field(default_factory=list)

    def restart(self) -> None:
        """Another plan has changed the groups: windows seen since the move do not count."""
        self._after.clear()

    def judge(self, window: Window, rate_per_s: float) -> Verdict | None:
        """None until enough windows were seen."""
        self._after.append(window)
        if len(self._after) < self.limits.num_windows:
            return None
        before_s, after_s = self._means(lambda w: w.e2e_s)
        return Verdict(self._harm(rate_per_s), f"E2E {before_s:.3g} -> {after_s:.3g} s")

    def _harm(self, rate_per_s: float) -> str:
        limits = self.limits
        e2e_before, e2e_after = self._means(lambda w: w.e2e_s)
        if max(self._means(lambda w: w.queue_s)) > limits.waiting * min(e2e_before, e2e_after):
            # More requests came than were answered, so the backlog grew while the move was made.
            # Only the pace of answers shows the move's effect.
            before, after = self._means(lambda w: w.answered_per_s)
            has_slowed = after < before * (1 - limits.max_pace_drop)
            return f"answers fell from {before:.3g} to {after:.3g} per s" if has_slowed else ""
        before, after = self._means(lambda w: w.success_share)
        if after < before - limits.max_success_drop:
            return f"success fell from {before:.1%} to {after:.1%}"
        if rate_per_s > self.rate_per_s * (1 + limits.max_e2e_rise):
            return ""  # more requests come: slower answers say nothing about the move
        if e2e_after > e2e_before * (1 + limits.max_e2e_rise):
            return f"E2E rose from {e2e_before:.3g} to {e2e_after:.3g} s"
        return ""

    def _means(self, value: Callable[[Window], float]) -> tuple[float, float]:
        """The means of `value` over the windows before the move, and over those after it."""
        return statistics.mean(map(value, self.before)), statistics.mean(map(value, self._after))


@dataclass(slots=True)
class Cooldown:
    """Keeps a role from getting more instances for a time that `failed` and `kept` set."""

    first_s: float
    max_s: float
    _next_s: float = field(init=False)
    _until: float = -math.inf
    _role: Role | None = None
    _kept_role: Role | None = None  # what the last good move was for

    def __post_init__(self) -> None:
        self._next_s = self.first_s

    def covers(self, role: Role, now: float) -> bool:
        return now < self._until and role is self._role

    def failed(self, role: Role, now: float) -> None:
        """A move for `role` did harm, or could not be made: the next time is twice as long."""
        self._until, self._role = now + self._next_s, role
        self._next_s = min(2 * self._next_s, self.max_s)

    def kept(self, role: Role, now: float) -> None:
        """Make moves for the other role wait, longer each time that the two roles alternate.

        Otherwise noise would swing the ratio when both roles are near their limit.
        """
        is_calm = now > self._until + self.max_s
        if self._kept_role is None or role is self._kept_role or is_calm:
            self._next_s = self.first_s
        self._kept_role = role
        self.failed(other(role), now)
