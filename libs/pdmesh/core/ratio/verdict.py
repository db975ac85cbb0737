"""Decides whether a change of the ratio of prefills to decodes stays or is undone (S28).

A move gives one role of a group one more instance. The measurements after the move are
compared with the measurements that led to it. The move is undone only if it did visible harm: less
success, slower answers, or fewer answers per second while requests wait. After a move that was
undone, the same role gets no more instances for a while. After a good move, the other role gets no
more instances for a while.
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
    max_e2e_rise: float = 0.10  # of the mean, unless the request rate has grown since the move
    # If requests wait at the gateway for this share of E2E, more arrive than can be answered.
    waiting: float = 0.25
    max_pace_drop: float = 0.05  # of answers per second, while requests wait


@dataclass(frozen=True, slots=True)
class Verdict:
    """The judgement of a move. `harm` is the reason to undo it, or empty if it stays."""

    harm: str
    e2e_text: str


@dataclass(slots=True)
class MoveTrial:
    """The trial of one move, from its planning until `judge` returns a verdict.

    `short_of` is the role that gets an instance. A window has the measurements of one period.
    `before` has the windows that led to the move, and `rate_per_s` is the request rate at that
    time.
    """

    move: Move
    short_of: Role
    before: Sequence[Window]
    rate_per_s: float
    limits: VerdictLimits
    _after: list[Window] = field(default_factory=list)

    def restart(self) -> None:
        """Forget the windows since the move, because other moves have changed the groups."""
        self._after.clear()

    def judge(self, window: Window, rate_per_s: float) -> Verdict | None:
        """Add a window. Returns the verdict, or None until there are enough windows."""
        self._after.append(window)
        if len(self._after) < self.limits.num_windows:
            return None
        before_s, after_s = self._means(lambda w: w.e2e_s)
        return Verdict(self._harm(rate_per_s), f"E2E {before_s:.3g} -> {after_s:.3g} s")

    def _harm(self, rate_per_s: float) -> str:
        limits = self.limits
        e2e_before, e2e_after = self._means(lambda w: w.e2e_s)
        if max(self._means(lambda w: w.queue_s)) > limits.waiting * min(e2e_before, e2e_after):
            # More requests arrive than are answered, so E2E grows with or without the move. Only
            # the rate of answers shows the effect of the move.
            before, after = self._means(lambda w: w.answered_per_s)
            has_slowed = after < before * (1 - limits.max_pace_drop)
            return f"answers fell from {before:.3g} to {after:.3g} per s" if has_slowed else ""
        before, after = self._means(lambda w: w.success_share)
        if after < before - limits.max_success_drop:
            return f"success fell from {before:.1%} to {after:.1%}"
        if rate_per_s > self.rate_per_s * (1 + limits.max_e2e_rise):
            return ""  # the request rate has grown, which may explain slower answers
        if e2e_after > e2e_before * (1 + limits.max_e2e_rise):
            return f"E2E rose from {e2e_before:.3g} to {e2e_after:.3g} s"
        return ""

    def _means(self, value: Callable[[Window], float]) -> tuple[float, float]:
        """The means of `value` over the windows before the move, and over those after it."""
        return statistics.mean(map(value, self.before)), statistics.mean(map(value, self._after))


@dataclass(slots=True)
class Cooldown:
    """A time in which one role gets no more instances, set by `failed` and `kept`."""

    first_s: float
    max_s: float
    _next_s: float = field(init=False)
    _until: float = -math.inf
    _role: Role | None = None
    _kept_role: Role | None = None  # the role that got an instance in the last good move

    def __post_init__(self) -> None:
        self._next_s = self.first_s

    def covers(self, role: Role, now: float) -> bool:
        return now < self._until and role is self._role

    def failed(self, role: Role, now: float) -> None:
        """Let further moves for `role` wait, after a move was harmful or failed.

        The next wait is twice as long, but at most `max_s`.
        """
        self._until, self._role = now + self._next_s, role
        self._next_s = min(2 * self._next_s, self.max_s)

    def kept(self, role: Role, now: float) -> None:
        """Let moves for the other role wait after a good move for `role`.

        The wait gets longer each time that good moves alternate between the two roles. Otherwise
        noise would move instances back and forth when both roles are near their limit.
        """
        is_calm = now > self._until + self.max_s
        if self._kept_role is None or role is self._kept_role or is_calm:
            self._next_s = self.first_s
        self._kept_role = role
        self.failed(other(role), now)
