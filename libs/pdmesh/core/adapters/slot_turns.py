"""Decides which adapter gets a slot when more adapters are asked for than an engine has slots.

A slot stays with its adapter while legs use it. An adapter with many requests would never lose its
slot. So an adapter that is refused a slot waits for its turn, in order of arrival. For each adapter
that waits and finds no free slot, one adapter takes no new legs: the one that has had its slot
longest, if it has had it for `TURN_S`. Its slot is free when its legs have ended. It then waits for
its next turn behind the others.

A client that gives up does not say so. A turn is therefore kept only while the adapter is asked for
again within `CLAIM_S`. Gateways ask again after 2 s at most.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

CLAIM_S: Final = 5.0
TURN_S: Final = 1.0  # an adapter keeps its slot for at least this long, because loading takes time
_MAX_CLAIMS: Final = 64


@dataclass(slots=True)
class AdapterTurns:
    """Adapters by digest. `left` gives back what `taken` took."""

    num_slots: int
    _legs: Counter[str] = field(default_factory=Counter)
    _since: OrderedDict[str, float] = field(default_factory=OrderedDict)  # when each got its slot
    _claims: OrderedDict[str, float] = field(default_factory=OrderedDict)  # until when each waits

    @property
    def legs(self) -> Counter[str]:
        """How many legs compute with each adapter."""
        return self._legs

    def why_not(self, adapter: str, now: float) -> str:
        """Why a leg of the adapter must wait; empty if it may begin.

        An adapter that must wait gets a place in the order, unless too many wait.
        """
        if not adapter:
            return ""
        self._expire(now)
        if adapter in self._legs:
            why = "" if adapter not in self._yielding(now) else "another adapter gets its slot next"
        else:
            why = "" if self._is_next(adapter) else "all adapter slots are in use"
        if adapter in self._claims or (why and len(self._claims) < _MAX_CLAIMS):
            self._claims[adapter] = now + CLAIM_S
        return why

    def taken(self, adapter: str, now: float) -> None:
        """A leg of the adapter begins. `why_not` has returned nothing."""
        if not adapter:
            return
        self._legs[adapter] += 1
        self._since.setdefault(adapter, now)
        self._claims.pop(adapter, None)

    def left(self, adapter: str) -> None:
        if not adapter:
            return
        self._legs[adapter] -= 1
        if not self._legs[adapter]:
            del self._legs[adapter], self._since[adapter]

    def _is_next(self, adapter: str) -> bool:
        num_free = self.num_slots - len(self._legs)
        waiting = [claimed for claimed in self._claims if claimed not in self._legs]
        first = waiting[:num_free]
        return adapter in first or (adapter not in waiting and len(waiting) < num_free)

    def _yielding(self, now: float) -> list[str]:
        """The adapters that take no new legs: one for each that waits without a free slot."""
        num_free = self.num_slots - len(self._legs)
        num_waiting = sum(claimed not in self._legs for claimed in self._claims)
        had_turn = (adapter for adapter, since in self._since.items() if now >= since + TURN_S)
        return list(islice(had_turn, max(0, num_waiting - num_free)))

    def _expire(self, now: float) -> None:
        for adapter in [adapter for adapter, until in self._claims.items() if until <= now]:
            del self._claims[adapter]

    def check_invariants(self) -> None:
        assert len(self._legs) <= self.num_slots
        assert all(num > 0 for num in self._legs.values())
        assert self._since.keys() == self._legs.keys()
        assert len(self._claims) <= _MAX_CLAIMS
