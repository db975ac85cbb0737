"""Decides which of the instances that are judged sick are really ejected (S34).

To eject an instance is to take it out of service for a fault. Two caps protect the fleet from a
wrong judgement.

The health-monitor has `EjectionCap`. It ejects only a share of each group and role at a time. If a
group has only one instance of a role, that instance is ejected only on a proof. If much of the
fleet looks sick, the judging itself is probably wrong, so no further instance is ejected. This
state is called panic. In panic even a proof is ignored, because a bad driver may report every
device as broken. Instances that were ejected earlier stay out. They were judged while most others
were well, and a request to one of them would fail.

The leading master has `FleetEjectionCap`. It counts the ejections that are in force, over all
groups together. So a false fault signal that appears everywhere cannot empty the fleet bit by bit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from pdmesh.core.health.fault_levels import RESPONSES, FaultJudged, Level

CAP: Final = "cap"
PANIC: Final = "panic"


@dataclass(frozen=True, slots=True)
class EjectionLimits:
    """Limits of the health-monitor's cap.

    `max_ejected_share` is a share of the instances of one group and role. `panic_share` is a share
    of the fleet.
    """

    max_ejected_share: float = 0.34
    panic_share: float = 0.5
    min_for_panic: int = 4
    settle_s: float = 60.0  # an ejected instance counts in the cap for at least this time


class Suspected(Protocol):
    """An instance with its judgement. `since` is when the judgement began."""

    @property
    def instance_id(self) -> str: ...
    @property
    def peers(self) -> tuple[str, str]:
        """Group and role."""
        ...

    @property
    def is_ejectable(self) -> bool: ...
    @property
    def has_proof(self) -> bool: ...
    @property
    def since(self) -> float: ...


@dataclass(frozen=True, slots=True)
class EjectionDecision:
    """The sick instances that are held back, with the reasons, and the ejections that begin now."""

    held_back: Mapping[str, str]
    ejected: tuple[str, ...] = ()


@dataclass(slots=True)
class EjectionCap:
    limits: EjectionLimits
    # When each instance was ejected, by group and role.
    _out: dict[tuple[str, str], dict[str, float]] = field(default_factory=dict)

    def rule(self, suspected: Collection[Suspected], now: float) -> EjectionDecision:
        """Decide for the whole fleet. Call this after each judgement.

        An instance that was ejected earlier is not held back.
        """
        sick = [each for each in suspected if each.is_ejectable]
        is_many = len(sick) > self.limits.panic_share * len(suspected)
        is_panic = len(suspected) >= self.limits.min_for_panic and is_many
        by_peers: dict[tuple[str, str], list[Suspected]] = {}
        for one in suspected:
            by_peers.setdefault(one.peers, []).append(one)
        held: dict[str, str] = {}
        ejected: list[str] = []
        for key in sorted({each.peers for each in sick} | self._out.keys()):
            over, new = self._over_cap(key, by_peers.get(key, []), now, is_panic=is_panic)
            held |= dict.fromkeys(over, PANIC if is_panic else CAP)
            ejected += new
        return EjectionDecision(held, tuple(ejected))

    def out(self, peers: tuple[str, str]) -> Collection[str]:
        return self._out.get(peers, {}).keys()

    def _over_cap(
        self, key: tuple[str, str], peers: Collection[Suspected], now: float, *, is_panic: bool
    ) -> tuple[list[str], list[str]]:
        """The ids of sick instances that the cap holds back, and the ids of those that are ejected
        now.
        """
        sick = {each.instance_id: each for each in peers if each.is_ejectable}
        out = {
            instance_id: at
            for instance_id, at in self._out.get(key, {}).items()
            if instance_id in sick or now - at < self.limits.settle_s
        }
        num_peers = len({each.instance_id for each in peers} | out.keys())
        may_be_out = 0 if is_panic else max(1, int(self.limits.max_ejected_share * num_peers))
        over, ejected = [], []
        for each in _worst_first(sick.values()):
            is_last = num_peers == 1 and not each.has_proof
            if each.instance_id not in out and (len(out) >= may_be_out or is_last):
                over.append(each.instance_id)
            elif each.instance_id not in out or out[each.instance_id] < each.since:
                out[each.instance_id] = now
                ejected.append(each.instance_id)
        self._out[key] = out
        if not out:
            del self._out[key]
        return over, ejected


def _worst_first(sick: Iterable[Suspected]) -> list[Suspected]:
    return sorted(sick, key=lambda each: (not each.has_proof, each.since, each.instance_id))


@dataclass(frozen=True, slots=True)
class TakenOut:
    """How an instance is out of service.

    It was taken out gracefully (drained) or at once, and for a fault (ejected) or by an operator's
    order (cordoned).
    """

    is_drain: bool
    is_ejected: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class FleetEjections:
    """Instances to take out of service now, in this order, and instances that the cap newly holds
    back.
    """

    taken_out: Mapping[str, TakenOut]
    over_cap: tuple[str, ...]


@dataclass(slots=True)
class FleetEjectionCap:
    """The master's cap. It counts the instances that the master took out, whatever they report."""

    max_share: float = 0.2  # the share of all instances that may be out; one may always be out
    _over: set[str] = field(default_factory=set)
    _overruled: dict[str, FaultJudged] = field(default_factory=dict)

    def overrule(self, instance_id: str, fault: FaultJudged) -> None:
        """An operator put the instance back into service.

        Only a new judgement may eject it again.
        """
        self._overruled[instance_id] = fault

    def rule(
        self, faults: Mapping[str, FaultJudged | None], out: Mapping[str, TakenOut]
    ) -> FleetEjections:
        """Decide which faulty instances to take out of service now.

        `faults` has every instance of the fleet. `out` has the instances that are already out of
        service.
        """
        self._overruled = {i: f for i, f in self._overruled.items() if faults.get(i) == f}
        faulty = {
            i: fault
            for i, fault in sorted(faults.items())
            if fault is not None and _is_to_leave(fault) and i not in self._overruled
        }
        self._over &= faulty.keys()
        room = max(1, int(self.max_share * len(faults))) - sum(e.is_ejected for e in out.values())
        taken_out: dict[str, TakenOut] = {}
        over: list[str] = []
        for instance_id, fault in faulty.items():
            is_drain, before = RESPONSES[fault.level].finishes_running, out.get(instance_id)
            if before is not None and (is_drain or not before.is_drain):
                continue  # already taken out as its level requires
            if before is None and room <= 0:
                over.append(instance_id)
                continue
            room -= before is None
            is_ejected = before is None or before.is_ejected
            taken_out[instance_id] = TakenOut(is_drain, is_ejected, str(fault))
        new = tuple(i for i in over if i not in self._over)
        self._over.update(new)
        return FleetEjections(taken_out, new)


def _is_to_leave(fault: FaultJudged) -> bool:
    return fault.level >= Level.INSTANCE and not fault.held_back
