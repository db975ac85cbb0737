"""Decides which role a scenario is short of (S29, S32).

It looks at the mean E2E, the share of prefill in it, and how busy both roles are. P/D-Serve 3.3: if
E2E rises and the share rises, prefills are short; if E2E rises and the share falls, decodes are. A
change counts only if it lasts for several windows. It is measured against a reference that stands
until a move is made, the present state counts as normal, or E2E has been lower for several windows.
So noise does not add up, and slow growth is not absorbed. Windows with too few requests do not
count. A shortage that is there from the start never shows as a rise. So a role that stays saturated
while the other has room is a finding, too.

The wait at the gateway counts as prefill, since prefills keep no queue (S40). But if decodes are
full, prompts keep their prefill slots for lack of a decode (S41), and the wait counts as decode.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from pdmesh.core.model import Role
from pdmesh.core.moves.move import other

FULL: Final = 0.95  # of a role's slots and KV: the next request waits


@dataclass(frozen=True, slots=True)
class Window:
    """Means, in seconds, over the requests of a scenario that were answered in one window.

    E2E = queue + t_p + t_d. `success_share`: the share of the ended requests that was answered;
    `answered_per_s`: how many were answered per second. `prefill_busy`, `decode_busy`: shares 0..1;
    None: not known.
    """

    num_requests: int
    queue_s: float
    t_p_s: float
    t_d_s: float
    success_share: float = 1.0
    prefill_busy: float | None = None
    decode_busy: float | None = None
    answered_per_s: float = 0.0

    @property
    def e2e_s(self) -> float:
        return self.queue_s + self.t_p_s + self.t_d_s

    @property
    def prefill_share(self) -> float:
        """T_p / E2E; the wait at the gateway counts for the role that causes it."""
        is_decode_full = self.decode_busy is not None and self.decode_busy >= FULL
        prefill_s = self.t_p_s if is_decode_full else self.t_p_s + self.queue_s
        return prefill_s / self.e2e_s if self.e2e_s else 0.0

    def busy(self, role: Role) -> float | None:
        return self.prefill_busy if role is Role.PREFILL else self.decode_busy


@dataclass(frozen=True, slots=True)
class DetectorLimits:
    min_requests: int = 20  # per window; fewer say nothing
    num_windows: int = 3  # windows in a row that must agree
    num_reference: int = 6  # windows whose mean is the reference
    e2e_rise: float = 0.15  # relative
    share_change: float = 0.08  # relative
    saturated: float = 0.85  # busy share of a role that is short
    roomy: float = 0.70  # largest busy share of the other role, which could give an instance


@dataclass(frozen=True, slots=True)
class Reference:
    e2e_s: float
    prefill_share: float


@dataclass(frozen=True, slots=True)
class Finding:
    """`short_of`: the role; None: E2E rose, and neither role stands out.

    `reason` has the numbers.
    """

    short_of: Role | None
    reason: str


@dataclass(slots=True)
class BottleneckDetector:
    """One per scenario.

    Feed it each window; a finding is repeated as long as it holds, until `rebase`.
    """

    limits: DetectorLimits = field(default_factory=DetectorLimits)
    reference: Reference | None = None
    _learning: list[Window] = field(default_factory=list)
    _recent: deque[Window] = field(init=False)

    def __post_init__(self) -> None:
        self._recent = deque(maxlen=self.limits.num_windows)

    @property
    def recent(self) -> tuple[Window, ...]:
        """The windows on which a finding rests."""
        return tuple(self._recent)

    def rebase(self) -> None:
        """Learn the reference again: a move was made, or the present state counts as normal."""
        self.reference = None
        self._learning.clear()
        self._recent.clear()

    def handle(self, window: Window) -> Finding | None:
        if window.num_requests < self.limits.min_requests:
            return None
        self._recent.append(window)
        if self.reference is None:
            self._learn(window)
        if len(self._recent) < self.limits.num_windows:
            return None
        return self._risen() or self._saturated()

    def _learn(self, window: Window) -> None:
        self._learning.append(window)
        if len(self._learning) >= self.limits.num_reference:
            self.reference = Reference(
                statistics.mean(w.e2e_s for w in self._learning),
                statistics.mean(w.prefill_share for w in self._learning),
            )
            self._learning.clear()

    def _risen(self) -> Finding | None:
        reference, limits = self.reference, self.limits
        if reference is None or not reference.e2e_s:
            return None
        rises = [w.e2e_s / reference.e2e_s - 1 for w in self._recent]
        if max(rises) < -limits.e2e_rise:
            self.reference = None  # E2E was lower for as many windows as a finding needs
            return None
        if min(rises) < limits.e2e_rise:
            return None
        shares = [w.prefill_share for w in self._recent]
        before, now = reference.prefill_share, statistics.mean(shares)
        text = (
            f"E2E {reference.e2e_s:.3g} -> {self._recent[-1].e2e_s:.3g} s, T_p share {before:.1%} "
            f"-> {now:.1%}"
        )
        if min(shares) > before * (1 + limits.share_change):
            return Finding(Role.PREFILL, text)
        if max(shares) < before * (1 - limits.share_change):
            return Finding(Role.DECODE, text)
        return Finding(None, text)

    def _saturated(self) -> Finding | None:
        for role in (Role.PREFILL, Role.DECODE):
            own = [w.busy(role) for w in self._recent]
            others = [w.busy(other(role)) for w in self._recent]
            if _all_over(own, self.limits.saturated) and _all_under(others, self.limits.roomy):
                name, far = role.value, other(role).value
                return Finding(role, f"{name}s {own[-1]:.0%} busy, {far}s {others[-1]:.0%}")
        return None


def _all_over(shares: list[float | None], limit: float) -> bool:
    return all(share is not None and share >= limit for share in shares)


def _all_under(shares: list[float | None], limit: float) -> bool:
    return all(share is not None and share <= limit for share in shares)
