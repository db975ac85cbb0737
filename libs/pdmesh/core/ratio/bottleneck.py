"""Decides whether a scenario has too few prefills or too few decodes (S29, S32).

A scenario is a kind of requests with its own instances. The detector gets the measurements of the
scenario's requests, window by window. It follows P/D-Serve 3.3. If the time of whole requests (E2E)
rises and the share of prefill in it rises, prefills are short. If E2E rises and the share falls,
decodes are short. The rise must last for several windows. The rise is measured against a fixed
reference, so that slow growth is found as well. A shortage that exists from the start causes no
rise. So the detector also reports a role that stays saturated while the other has room.

Prefills have no queue, so the wait at the gateway counts as time of prefill (S40). But if decodes
are full, prompts keep their prefill slots until a decode takes them (S41). The wait then counts as
time of decode.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from pdmesh.core.model import Role
from pdmesh.core.moves.move import other

FULL: Final = 0.95  # a role with this busy share is full, and the next request waits


@dataclass(frozen=True, slots=True)
class Window:
    """Means, in seconds, over the requests of a scenario that were answered in one window.

    The whole time of a request is E2E = queue + t_p + t_d. `success_share` is the share of ended
    requests that were answered. `prefill_busy` and `decode_busy` are the loads of the roles, 0..1,
    or None if unknown.
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
        """The share of prefill in E2E, with the wait at the gateway unless decodes are full."""
        is_decode_full = self.decode_busy is not None and self.decode_busy >= FULL
        prefill_s = self.t_p_s if is_decode_full else self.t_p_s + self.queue_s
        return prefill_s / self.e2e_s if self.e2e_s else 0.0

    def busy(self, role: Role) -> float | None:
        return self.prefill_busy if role is Role.PREFILL else self.decode_busy


@dataclass(frozen=True, slots=True)
class DetectorLimits:
    min_requests: int = 20  # windows with fewer requests are ignored
    num_windows: int = 3  # this many successive windows must agree
    num_reference: int = 6  # the reference is the mean of this many windows
    e2e_rise: float = 0.15  # relative
    share_change: float = 0.08  # relative
    saturated: float = 0.85  # a role that is short is at least this busy
    roomy: float = 0.70  # a role that could give up an instance is at most this busy


@dataclass(frozen=True, slots=True)
class Reference:
    e2e_s: float
    prefill_share: float


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of the detector. `reason` has the numbers.

    `short_of` is None if E2E rose but the share of prefill hardly changed.
    """

    short_of: Role | None
    reason: str


@dataclass(slots=True)
class BottleneckDetector:
    """The detector of one scenario. Pass each window to `handle`.

    As long as a finding is true, it is returned for each window, until `rebase`.
    """

    limits: DetectorLimits = field(default_factory=DetectorLimits)
    reference: Reference | None = None
    _learning: list[Window] = field(default_factory=list)
    _recent: deque[Window] = field(init=False)

    def __post_init__(self) -> None:
        self._recent = deque(maxlen=self.limits.num_windows)

    @property
    def recent(self) -> tuple[Window, ...]:
        """The last windows, from which a finding is made."""
        return tuple(self._recent)

    def rebase(self) -> None:
        """Learn the reference again, after a move or because the current state is normal."""
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
            self.reference = None  # E2E has fallen, so learn a lower reference
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
