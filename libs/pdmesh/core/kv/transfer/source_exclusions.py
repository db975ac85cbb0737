"""Decides from which sources a decode takes no KV for a while (F23, F24, F34).

A source is a prefill whose KV a decode pulls. A decode *ejects* a source whose KV was corrupt three
times within a minute, because no token may be computed from corrupt KV. It *avoids* a source after
two pulls within 30 s that could not reach the source, without a good pull between them, or after
three slow pulls within ten minutes. It uses an avoided source only if there is no other. A pull is
slow if the wait for its KV took more than a second, and more than twice as long as computing the
KV. A pull that was faster than computing sets the count of slow pulls to zero. After an exclusion
for slow pulls, one more slow pull excludes the source again.

The link between a source and a decode may be bad although both instances are well. So another pair
is tried. If there is none, one instance computes both phases. Only a new pull can show that the
fault is over. Therefore each exclusion ends after a time, or with the source's incarnation (one
life of the instance). A source that two decodes eject is ejected by all decodes.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Final, Generic, TypeVar

from pdmesh.core.kv.transfer.ticket import PullFailure

_UNREACHABLE: Final = frozenset({PullFailure.TIMEOUT, PullFailure.PEER_LOST, PullFailure.CONNECT})
_CONDEMNED: Final = 2  # a source that so many decodes eject is ejected by all
# KV is slow if the wait for the KV is longer than `_LEAST_SLOW_S`, and longer than this many times
# the time of computing the KV.
_SLOW_FACTOR: Final = 2.0
_LEAST_SLOW_S: Final = 1.0


MAX_SOURCES: Final = 1024

K = TypeVar("K", bound=Hashable)


class SourceFault(StrEnum):
    CORRUPT = "KV_CORRUPT"
    UNREACHABLE = "KV_UNREACHABLE"
    SLOW = "KV_SLOW"


_AVOIDED: Final = frozenset({SourceFault.UNREACHABLE, SourceFault.SLOW})


@dataclass(frozen=True, slots=True)
class KvSource:
    """One incarnation of an instance that sends KV. After a restart, its failures are forgotten."""

    instance_id: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class ExcludedSource:
    source: KvSource
    fault: SourceFault


@dataclass(slots=True)
class SourceStrikes(Generic[K]):
    """Counts the failures of sources, and excludes a source that failed too often.

    A source that fails `limit` times within `window_s` is excluded for `excluded_s`. Afterwards its
    earlier failures are forgotten, unless `is_probation` is set. In that case the next failure
    within `window_s` excludes the source again, unless `forgive` is called before.

    Fewer failures than `limit` do not matter, because memory and links fail once in a while. At
    most MAX_SOURCES are remembered. The source whose last failure is oldest is forgotten first.
    """

    limit: int = 3
    window_s: float = 60.0
    excluded_s: float = 60.0
    is_probation: bool = False
    _strikes: OrderedDict[K, deque[float]] = field(default_factory=OrderedDict)
    _excluded_until: dict[K, float] = field(default_factory=dict)

    def __len__(self) -> int:
        """The number of sources that are excluded now."""
        return len(self._excluded_until)

    def record(self, source: K, now: float) -> bool:
        """Record a failed pull from `source`. True if this failure excludes the source."""
        if source in self._excluded_until:
            return False  # the pull began before the source was excluded
        strikes = self._remember(source)
        strikes.append(now)
        while strikes[0] <= now - self.window_s:
            strikes.popleft()
        if len(strikes) < self.limit:
            return False
        del self._strikes[source]
        if len(self._excluded_until) >= MAX_SOURCES:
            return False
        self._excluded_until[source] = now + self.excluded_s
        return True

    def _remember(self, source: K) -> deque[float]:
        strikes = self._strikes.setdefault(source, deque(maxlen=self.limit))
        self._strikes.move_to_end(source)
        if len(self._strikes) > MAX_SOURCES:
            self._strikes.popitem(last=False)
        return strikes

    def last_strike(self, source: K) -> float:
        """The time of the last failure that still counts, or when probation began. -inf if none."""
        strikes = self._strikes.get(source)
        return strikes[-1] if strikes else -math.inf

    def forgive(self, source: K) -> None:
        """Forget the earlier failures of a source. An excluded source stays excluded."""
        self._strikes.pop(source, None)

    def excluded(self) -> list[K]:
        return list(self._excluded_until)

    def is_excluded(self, source: K, now: float) -> bool:
        until = self._excluded_until.get(source)
        return until is not None and now < until

    def release_due(self, now: float) -> list[K]:
        """The sources whose exclusion is over. Each is returned once."""
        due = [source for source, until in self._excluded_until.items() if now >= until]
        for source in due:
            del self._excluded_until[source]
            if self.is_probation and self.limit > 1:
                self._remember(source).extend([now] * (self.limit - 1))
        return due

    def check_invariants(self) -> None:
        assert len(self._strikes) <= MAX_SOURCES
        assert len(self._excluded_until) <= MAX_SOURCES
        assert not self._strikes.keys() & self._excluded_until.keys()
        assert all(0 < len(strikes) < self.limit for strikes in self._strikes.values())


def _strikes() -> dict[SourceFault, SourceStrikes[KvSource]]:
    return {
        SourceFault.CORRUPT: SourceStrikes(limit=3, window_s=60.0, excluded_s=60.0),
        SourceFault.UNREACHABLE: SourceStrikes(limit=2, window_s=30.0, excluded_s=30.0),
        SourceFault.SLOW: SourceStrikes(
            limit=3, window_s=600.0, excluded_s=30.0, is_probation=True
        ),
    }


@dataclass(slots=True)
class KvSources:
    """One decode's record of the sources that it pulls from."""

    _faults: dict[SourceFault, SourceStrikes[KvSource]] = field(default_factory=_strikes)

    def failed(self, source: KvSource, reason: str, now: float) -> SourceFault | None:
        """Record a failed pull or fetch, with the reason of its `KvTransferFailed`.

        Returns the fault if the source is excluded from now on.
        """
        is_excluded = False
        fault = SourceFault.UNREACHABLE if reason in _UNREACHABLE else SourceFault.CORRUPT
        if reason in _UNREACHABLE or reason == PullFailure.CORRUPT:
            is_excluded = self._faults[fault].record(source, now)
        return fault if is_excluded else None

    def succeeded(
        self, source: KvSource, waited_s: float, compute_s: float, now: float
    ) -> SourceFault | None:
        """Record that KV of the source came after a wait of `waited_s`.

        `compute_s` is how long computing the same KV takes. If that is not known, `compute_s` is
        0 and the source is not judged. Slow pulls whose waits overlap count as one. Good KV does
        not clear the record of corrupt KV, because corruption comes and goes. Returns the fault if
        the source is excluded as slow from now on.
        """
        self._faults[SourceFault.UNREACHABLE].forgive(source)
        slow = self._faults[SourceFault.SLOW]
        if compute_s <= 0:
            return None
        if waited_s <= compute_s:
            slow.forgive(source)
        is_slow = waited_s > max(_LEAST_SLOW_S, _SLOW_FACTOR * compute_s)
        if not is_slow or now - waited_s < slow.last_strike(source):
            return None
        return SourceFault.SLOW if slow.record(source, now) else None

    def ejects(self, source: KvSource, now: float) -> bool:
        return self._faults[SourceFault.CORRUPT].is_excluded(source, now)

    def excluded(self) -> list[ExcludedSource]:
        """The excluded sources by fault, oldest exclusions first.

        A source whose time is over is included until `release_due` is called.
        """
        return [
            ExcludedSource(source, fault)
            for fault, strikes in self._faults.items()
            for source in strikes.excluded()
        ]

    def release_due(self, now: float) -> list[ExcludedSource]:
        """The sources whose exclusion is over. Each is returned once."""
        return [
            ExcludedSource(source, fault)
            for fault, strikes in self._faults.items()
            for source in strikes.release_due(now)
        ]

    def check_invariants(self) -> None:
        for strikes in self._faults.values():
            strikes.check_invariants()


class Fit(IntEnum):
    """How well a decode and a prefill can exchange KV. The best value comes first."""

    GOOD = 0
    AVOIDED = 1
    EJECTED = 2


@dataclass(frozen=True, slots=True)
class SourceExclusions:
    """Instance ids of the prefills that one decode ejects or avoids."""

    ejected: frozenset[str] = frozenset()
    avoided: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.ejected or self.avoided)

    def fit(self, prefill_id: str) -> Fit:
        if prefill_id in self.ejected:
            return Fit.EJECTED
        return Fit.AVOIDED if prefill_id in self.avoided else Fit.GOOD


NO_EXCLUSIONS: Final = SourceExclusions()


@dataclass(frozen=True, slots=True)
class KvExchange:
    """Which instances should exchange KV, according to the reports of all decodes.

    A prefill that two decodes eject is ejected by all decodes.
    """

    _of: Mapping[str, SourceExclusions] = field(default_factory=dict)
    _others: SourceExclusions = NO_EXCLUSIONS  # the exclusions of decodes that are not in `_of`

    @classmethod
    def of(
        cls, reports: Mapping[str, Sequence[ExcludedSource]], incarnations: Mapping[str, int]
    ) -> KvExchange:
        """Combine the reports, which are by decode. Reports on earlier incarnations are ignored."""
        current = {
            decode: [
                h
                for h in excluded
                if incarnations.get(h.source.instance_id) == h.source.incarnation
            ]
            for decode, excluded in reports.items()
        }
        ejected = {
            decode: _ids(excluded, SourceFault.CORRUPT) for decode, excluded in current.items()
        }
        counts: dict[str, int] = {}
        for sources in ejected.values():
            for source in sources:
                counts[source] = counts.get(source, 0) + 1
        condemned = frozenset(s for s, count in counts.items() if count >= _CONDEMNED)
        exclusions = {
            decode: SourceExclusions(ejected[decode] | condemned, _ids(excluded, *_AVOIDED))
            for decode, excluded in current.items()
            if excluded
        }
        return cls(exclusions, SourceExclusions(condemned))

    def __bool__(self) -> bool:
        """False if every decode may take KV from every prefill."""
        return bool(self._of)

    def exclusions(self, decode_id: str) -> SourceExclusions:
        return self._of.get(decode_id, self._others)

    def fit(self, decode_id: str, prefill_id: str) -> Fit:
        return self.exclusions(decode_id).fit(prefill_id)

    def of_silent(self, num_decodes: int) -> SourceExclusions | None:
        """The exclusions of a decode without reports. None if all `num_decodes` may have reported.

        Every decode with reports excludes at least these sources, too. So no decode fits a prefill
        better than a decode without reports does.
        """
        return self._others if num_decodes > len(self._of) else None

    def reporters(self) -> Collection[str]:
        """The decodes that exclude at least one prefill."""
        return self._of.keys()

    def excludes(self, prefill_id: str) -> bool:
        """Whether any decode ejects or avoids the prefill."""
        each = (self._others, *self._of.values())
        return any(exclusions.fit(prefill_id) is not Fit.GOOD for exclusions in each)


def _ids(excluded: Iterable[ExcludedSource], *faults: SourceFault) -> frozenset[str]:
    return frozenset(h.source.instance_id for h in excluded if h.fault in faults)
