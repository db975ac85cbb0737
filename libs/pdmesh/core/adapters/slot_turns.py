"""Decides which LoRA adapter gets a slot if requests need more adapters than an engine has slots.

A leg is a request's stay on one instance. An adapter keeps its slot while any leg uses the adapter.
So an adapter with many requests would never lose its slot. To prevent this, an adapter that is
refused a slot waits for its turn, in order of arrival. For each waiting adapter without a free
slot, one loaded adapter takes no new legs: the one that has had its slot longest, and for at least
`TURN_S`. When the legs of that adapter have ended, its slot is free. If requests need that adapter
again, it waits behind the others.

The engine does not notice that a client gives up. So an adapter loses its turn unless a gateway
asks for it again within `CLAIM_S`. A gateway that still needs the adapter asks again after 2 s at
most.
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
    """The adapters that legs use or wait for, by digest. Each call of `left` undoes one call of
    `taken`.
    """

    num_slots: int
    _legs: Counter[str] = field(default_factory=Counter)
    _since: OrderedDict[str, float] = field(default_factory=OrderedDict)  # when each got its slot
    _claims: OrderedDict[str, float] = field(default_factory=OrderedDict)  # until when each waits

    @property
    def legs(self) -> Counter[str]:
        """How many legs use each adapter."""
        return self._legs

    def why_not(self, adapter: str, now: float) -> str:
        """Why a leg of the adapter must wait. The result is empty if the leg may begin.

        An adapter that must wait gets a place in the order of arrival, unless too many already
        wait.
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
        """A leg of the adapter begins. `why_not` must have returned an empty text for it."""
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
        """The adapters that take no new legs: one for each waiting adapter without a free slot."""
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
