"""Decides which of the instances that are judged sick are really ejected (S34).

It protects the fleet from its judge. Of one group and role only a share is ejected at a time, and
the only instance of them only by a proof. If much of the fleet looks sick, the fault is in our
observation, and no further instance is ejected (panic), not even by a proof: a bad driver proves
all of them sick. Instances that were ejected before stay out: they were judged while most others
were well, and a request that one of them gets would fail for certain.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

CAP: Final = "cap"
PANIC: Final = "panic"


@dataclass(frozen=True, slots=True)
class EjectionLimits:
    """Shares of the instances of one group and role (cap) or of the fleet (panic)."""

    max_ejected_share: float = 0.34
    panic_share: float = 0.5
    min_for_panic: int = 4
    settle_s: float = 60.0  # an ejected instance counts against the cap for at least so long


class Suspected(Protocol):
    """An instance as it is judged, and since when."""

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
    """Why nothing is done about an instance, and which ejections begin now."""

    held_back: Mapping[str, str]
    ejected: tuple[str, ...] = ()


@dataclass(slots=True)
class EjectionCap:
    limits: EjectionLimits
    _out: dict[tuple[str, str], dict[str, float]] = field(default_factory=dict)  # since when

    def rule(self, suspected: Collection[Suspected], now: float) -> EjectionDecision:
        """Decide for the whole fleet, each time it was judged. Ejected instances stay out."""
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
        """Ids of the sick that this group and role cannot do without, and of those ejected now."""
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
