"""Decides which idle instances are probed next with a small request, and what a failure means.

Without probes, an idle mesh would learn of a fault from its first client. A probe takes the same
path as a request: a prefill, the hand-over of its KV, a decode. An instance is chosen at most once
a period, and only while it is idle. It may take part in more probes as the partner of others.

Either instance may have caused a failure, so each gets a strike. The next probe uses other
partners, if there are any. A success clears the strikes of both instances. Two strikes in a row
make an instance suspect, but prove nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pdmesh.core.health.fault_judge import Signal
from pdmesh.core.health.fault_levels import Level
from pdmesh.core.model import Role

CANARY_FAILED = "CANARY_FAILED"


@dataclass(frozen=True, slots=True)
class ProbeTarget:
    """One incarnation of an instance. An incarnation is one life of the instance.

    A cell is the part of a group whose instances can exchange KV.
    """

    instance_id: str
    incarnation: int
    role: Role
    cell: str


@dataclass(frozen=True, slots=True)
class CanaryProbe:
    """If `decode` is None, `prefill` does both phases."""

    prefill: ProbeTarget
    decode: ProbeTarget | None

    @property
    def subjects(self) -> tuple[ProbeTarget, ...]:
        return (self.prefill,) if self.decode is None else (self.prefill, self.decode)


@dataclass(slots=True)
class _Record:
    incarnation: int
    tried_at: float
    partner: str = ""  # the partner in the last probe
    num_strikes: int = 0
    detail: str = ""


@dataclass(slots=True)
class CanaryRota:
    """`next` chooses the instances to probe, and `ended` takes the result. Times are in seconds."""

    period_s: float
    max_strikes: int = 2
    _records: dict[str, _Record] = field(default_factory=dict)

    def next(self, idle: Iterable[ProbeTarget], now: float) -> CanaryProbe | None:
        """A probe of the instance that was probed longest ago, or None if no instance is due.

        The partner is an instance of the other role in its cell, if there is one.
        """
        subjects = sorted(idle, key=lambda s: (self._record(s, now).tried_at, s.instance_id))
        due = [s for s in subjects if now - self._record(s, now).tried_at >= self.period_s]
        if not due:
            return None
        first = due[0]
        record = self._record(first, now)
        other = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}.get(first.role)
        partners = [s for s in subjects if s.cell == first.cell and s.role is other]
        partners.sort(key=lambda s: s.instance_id == record.partner)  # a new partner first
        if not partners:
            record.tried_at = now
            return CanaryProbe(first, None)
        partner = self._record(partners[0], now)
        record.tried_at = partner.tried_at = now
        record.partner, partner.partner = partners[0].instance_id, first.instance_id
        is_prefill = first.role is Role.PREFILL
        return CanaryProbe(first, partners[0]) if is_prefill else CanaryProbe(partners[0], first)

    def ended(
        self, probe: CanaryProbe, guilty: Sequence[ProbeTarget], detail: str, now: float
    ) -> None:
        """A probe has ended. `guilty` has the instances that may have caused a failure.

        `guilty` is empty if the probe passed.
        """
        for subject in probe.subjects:
            record = self._record(subject, now)
            if subject in guilty:
                record.num_strikes, record.detail = record.num_strikes + 1, detail
            elif not guilty:
                record.num_strikes, record.detail = 0, ""

    def signals(self, subject: ProbeTarget) -> tuple[Signal, ...]:
        record = self._records.get(subject.instance_id)
        if record is None or record.incarnation != subject.incarnation:
            return ()
        if record.num_strikes < self.max_strikes:
            return ()
        return (Signal("canary", CANARY_FAILED, Level.PROCESS, detail=record.detail),)

    def forget(self, instance_id: str) -> None:
        self._records.pop(instance_id, None)

    def _record(self, subject: ProbeTarget, now: float) -> _Record:
        """The record of an incarnation. A new one is due one period after it was first seen."""
        known = self._records.get(subject.instance_id)
        if known is None or known.incarnation != subject.incarnation:
            known = self._records[subject.instance_id] = _Record(subject.incarnation, now)
        return known
