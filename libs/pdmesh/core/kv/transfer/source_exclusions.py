"""Decides which sources a decode takes no KV from for a while (F23, F24, F34).

It uses what the decode found out itself and what all decodes report. A decode *ejects* a source
whose KV was corrupt three times within a minute: no token may be computed from such KV. It *avoids*
a source when pulls from it failed twice in a row within 30 s. It also avoids a source that was slow
three times within ten minutes: the wait for its KV took more than a second, and more than twice as
long as computing it. A pull that was faster than computing clears that count. After such an
exclusion, one slow pull is enough for the next.

The link between source and decode may be bad while both are well. So another pair is tried, or
else one instance computes both phases. Only another try shows that the fault is over. So each
exclusion ends after a time, or with the incarnation.
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
_CONDEMNED: Final = 2  # if this many decodes eject a source, the fault is the source's
# KV is slow if the wait for it is this many times as long as computing it, and long enough to
# notice.
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
    """One incarnation of an instance that sends KV. A restarted instance has a clean record."""

    instance_id: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class ExcludedSource:
    source: KvSource
    fault: SourceFault


@dataclass(slots=True)
class SourceStrikes(Generic[K]):
    """Counts failures of sources, which `K` names, and excludes a source that failed too often.

    A source that fails `limit` times within `window_s` is excluded for `excluded_s`. Then it starts
    with a clean record. A single failure is forgotten, since memory and links fail once in a while.
    At most MAX_SOURCES are remembered.

    The source whose last failure is oldest is forgotten first. `is_probation`: once a source's time
    is over, its next failure excludes it again, unless it is forgiven first.
    """

    limit: int = 3
    window_s: float = 60.0
    excluded_s: float = 60.0
    is_probation: bool = False
    _strikes: OrderedDict[K, deque[float]] = field(default_factory=OrderedDict)
    _excluded_until: dict[K, float] = field(default_factory=dict)

    def __len__(self) -> int:
        """The number of sources excluded now."""
        return len(self._excluded_until)

    def record(self, source: K, now: float) -> bool:
        """A pull from `source` failed. True if that excludes it."""
        if source in self._excluded_until:
            return False  # a pull that was under way when the source was excluded
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
        """When the last failure that still counts came, or when probation began; -inf: neither."""
        strikes = self._strikes.get(source)
        return strikes[-1] if strikes else -math.inf

    def forgive(self, source: K) -> None:
        """Its earlier failures no longer count. An excluded source stays excluded."""
        self._strikes.pop(source, None)

    def excluded(self) -> list[K]:
        return list(self._excluded_until)

    def is_excluded(self, source: K, now: float) -> bool:
        until = self._excluded_until.get(source)
        return until is not None and now < until

    def release_due(self, now: float) -> list[K]:
        """Sources whose time is over, each returned once."""
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
    """One decode's record of its sources. `failed` takes the reason of a `KvTransferFailed`."""

    _faults: dict[SourceFault, SourceStrikes[KvSource]] = field(default_factory=_strikes)

    def failed(self, source: KvSource, reason: str, now: float) -> SourceFault | None:
        """A pull or a fetch failed. Returns the fault if the source is excluded from now on."""
        is_excluded = False
        fault = SourceFault.UNREACHABLE if reason in _UNREACHABLE else SourceFault.CORRUPT
        if reason in _UNREACHABLE or reason == PullFailure.CORRUPT:
            is_excluded = self._faults[fault].record(source, now)
        return fault if is_excluded else None

    def succeeded(
        self, source: KvSource, waited_s: float, compute_s: float, now: float
    ) -> SourceFault | None:
        """Its KV came after `waited_s`. Returns the fault if this excludes the source as slow.

        `compute_s` is how long computing the same KV takes; 0: not known, which proves nothing.
        Pulls that waited at the same time are one observation. Good KV does not clear the record of
        corruption, which comes and goes.
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
        """By fault, oldest exclusions first. Sources whose time is over stay until
        `release_due`.
        """
        return [
            ExcludedSource(source, fault)
            for fault, strikes in self._faults.items()
            for source in strikes.excluded()
        ]

    def release_due(self, now: float) -> list[ExcludedSource]:
        """Sources whose time is over, each returned once."""
        return [
            ExcludedSource(source, fault)
            for fault, strikes in self._faults.items()
            for source in strikes.release_due(now)
        ]

    def check_invariants(self) -> None:
        for strikes in self._faults.values():
            strikes.check_invariants()


class Fit(IntEnum):
    """How well a decode and a prefill go together, best first."""

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

    A prefill that two decodes eject is ejected by all.
    """

    _of: Mapping[str, SourceExclusions] = field(default_factory=dict)
    _others: SourceExclusions = NO_EXCLUSIONS  # those of a decode that reports nothing

    @classmethod
    def of(
        cls, reports: Mapping[str, Sequence[ExcludedSource]], incarnations: Mapping[str, int]
    ) -> KvExchange:
        """`reports` by decode. A report about an earlier incarnation is ignored."""
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
        """The exclusions of a decode without reports; None if all `num_decodes` may have reported.

        No other decode excludes less. So with few reports, no pair has to be looked at.
        """
        return self._others if num_decodes > len(self._of) else None

    def reporters(self) -> Collection[str]:
        """The decodes that exclude some prefill."""
        return self._of.keys()

    def excludes(self, prefill_id: str) -> bool:
        """Whether any decode ejects or avoids it."""
        each = (self._others, *self._of.values())
        return any(exclusions.fit(prefill_id) is not Fit.GOOD for exclusions in each)


def _ids(excluded: Iterable[ExcludedSource], *faults: SourceFault) -> frozenset[str]:
    return frozenset(h.source.instance_id for h in excluded if h.fault in faults)
