"""Decides whether a group's new revision is as healthy as its old one.

An upgrade gives one group after another a new revision. A revision is worse if too many of its
requests fail, if its answers are too slow, or if several of its instances are lost or faulty. The
times of its answers are compared with the times of the unchanged groups in the same period or, if
these groups answered nothing, with the group's own times before the change. With too few answers, a
revision does not count as slow.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from pdmesh.core.groups.desired import UpgradeLimits

GroupRevision = tuple[str, str]  # group and revision

_MAX_GROUP_REVISIONS: Final = 1024
_BUCKET_S: Final = 5.0
_NUM_BUCKETS: Final = 120  # ten minutes
_MIN_ANSWERS: Final = 20  # the least answers of each revision before times are compared
_MIN_FAILED: Final = 3
_MAX_INCIDENTS: Final = 1  # this many lost or faulty instances may be chance
_T_P_NOISE_S: Final = 0.05  # a smaller increase of the mean is ignored
_TPOT_NOISE_S: Final = 0.005
# Reasons that an instance reports in addition to the failure itself.
_NO_FAILURES: Final = frozenset({"KV_SOURCE_EXCLUDED", "KV_SOURCE_RELEASED"})


@dataclass(frozen=True, slots=True)
class RequestAnswered:
    """A request was answered. `AnswerTimes` describes `t_p_s` and `tpot_s`."""

    group_revision: GroupRevision
    t_p_s: float
    tpot_s: float | None


@dataclass(frozen=True, slots=True)
class LegFailureReported:
    """A request failed on an instance of the group. The client may not have noticed."""

    group_revision: GroupRevision


def is_failed_leg(reason: str, request_id: str) -> bool:
    """Whether an error that an instance reported counts as a failed request."""
    return bool(request_id) and reason not in _NO_FAILURES


@dataclass(frozen=True, slots=True)
class AnswerTimes:
    """Times of one answer, in seconds since the request arrived.

    `queued_s` is the time that the request spent in the gateway's waiting room.
    """

    queued_s: float
    first_token_s: float
    end_s: float

    def t_p_s(self, *, is_pooling: bool) -> float:
        """Seconds from the end of waiting to token 1, or to the end of a pooling call."""
        return max(0.0, (self.end_s if is_pooling else self.first_token_s) - self.queued_s)

    def tpot_s(self, num_tokens: int) -> float | None:
        """Seconds per token after the first one, or None if there were no further tokens."""
        if num_tokens < 2:
            return None
        return max(0.0, self.end_s - self.first_token_s) / (num_tokens - 1)


@dataclass(slots=True)
class Tally:
    """Counts of answers and failures, and sums of their times in seconds."""

    num: int = 0
    num_failed: int = 0
    num_tpot: int = 0
    t_p_s: float = 0.0
    tpot_s: float = 0.0

    def add(self, other: Tally) -> None:
        self.num += other.num
        self.num_failed += other.num_failed
        self.num_tpot += other.num_tpot
        self.t_p_s += other.t_p_s
        self.tpot_s += other.tpot_s

    @property
    def failed_share(self) -> float:
        total = self.num + self.num_failed
        return self.num_failed / total if total else 0.0


@dataclass(slots=True)
class Answers:
    """The answers of at least the last ten minutes, by group and revision.

    If there are too many pairs of group and revision, the least recently used one is forgotten.
    """

    _buckets: OrderedDict[GroupRevision, deque[tuple[float, Tally]]] = field(
        default_factory=OrderedDict
    )

    def handle(self, event: RequestAnswered | LegFailureReported, now: float) -> None:
        tally = self._bucket(event.group_revision, now)
        match event:
            case LegFailureReported():
                tally.num_failed += 1
            case RequestAnswered(_, t_p_s, tpot_s):
                tally.num += 1
                tally.t_p_s += t_p_s
                if tpot_s is not None:
                    tally.num_tpot += 1
                    tally.tpot_s += tpot_s

    def of(self, group_revisions: Collection[GroupRevision], since: float, until: float) -> Tally:
        """The sum over the buckets that began at `since` or later, and before `until`."""
        total = Tally()
        for group_revision in group_revisions:
            for began, tally in self._buckets.get(group_revision, ()):
                if since <= began < until:
                    total.add(tally)
        return total

    def _bucket(self, group_revision: GroupRevision, now: float) -> Tally:
        buckets = self._buckets.setdefault(group_revision, deque(maxlen=_NUM_BUCKETS))
        self._buckets.move_to_end(group_revision)
        if len(self._buckets) > _MAX_GROUP_REVISIONS:
            self._buckets.popitem(last=False)
        if not buckets or now - buckets[-1][0] >= _BUCKET_S:
            buckets.append((now, Tally()))
        return buckets[-1][1]


def why_too_many(incidents: Mapping[str, str]) -> str:
    """The lost or faulty instances with their reasons, or empty if there are too few to matter."""
    if len(incidents) <= _MAX_INCIDENTS:
        return ""
    return ", ".join(f"{instance}: {why}" for instance, why in sorted(incidents.items()))


def why_worse(new: Tally, old: Tally, limits: UpgradeLimits) -> str:
    """Why the new revision is worse than the old one, or empty if no fault is found."""
    if new.num_failed >= _MIN_FAILED and new.failed_share > limits.max_failed_share:
        return f"{new.failed_share:.1%} of its requests failed"
    if min(new.num, old.num) >= _MIN_ANSWERS:
        before, after = old.t_p_s / old.num, new.t_p_s / new.num
        if _is_slower(before, after, _T_P_NOISE_S, limits):
            return f"T_p is {1e3 * after:.0f} ms instead of {1e3 * before:.0f} ms"
    if min(new.num_tpot, old.num_tpot) >= _MIN_ANSWERS:
        before, after = old.tpot_s / old.num_tpot, new.tpot_s / new.num_tpot
        if _is_slower(before, after, _TPOT_NOISE_S, limits):
            return f"a token takes {1e3 * after:.0f} ms instead of {1e3 * before:.0f} ms"
    return ""


def _is_slower(before: float, after: float, noise_s: float, limits: UpgradeLimits) -> bool:
    return after > before * limits.max_slowdown and after - before > noise_s
