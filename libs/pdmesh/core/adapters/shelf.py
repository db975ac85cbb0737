"""Decides which adapters an engine holds.

An adapter is loaded on its first use. It is unloaded when another one needs its slot, or when it is
removed. An engine has few slots. An adapter stays in its slot while any leg uses it, and the least
recently used one makes room for another. Only one slot changes at a time. A leg waits if there is
no room for its adapter. Admission accepts no more adapters than there are slots, so such a leg
waits only for legs that have just been aborted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from pdmesh.core.adapters.adapter import Adapter


@dataclass(frozen=True, slots=True)
class Load:
    """Load an adapter; `loaded` or `failed` follows."""

    adapter: Adapter


@dataclass(frozen=True, slots=True)
class Unload:
    """Unload an adapter; `unloaded` follows."""

    digest: str


@dataclass(frozen=True, slots=True)
class Ready:
    """The leg's adapter is loaded, and stays until the leg leaves."""

    leg: int


@dataclass(frozen=True, slots=True)
class CannotUse:
    """The leg's adapter could not be loaded, so the shelf has removed the leg."""

    leg: int
    why: str


Effect = Load | Unload | Ready | CannotUse


@dataclass(slots=True)
class AdapterShelf:
    num_slots: int
    _legs: dict[int, Adapter] = field(default_factory=dict)  # including legs that wait
    _waiting: dict[int, None] = field(default_factory=dict)  # in order of arrival
    # The most recently used is last.
    _loaded: OrderedDict[str, None] = field(default_factory=OrderedDict)
    _moving: str | None = None  # the adapter that is being loaded or unloaded
    _kept: frozenset[str] | None = None  # the registered adapters; None: not known yet

    @property
    def loaded(self) -> tuple[str, ...]:
        """The digests of the loaded adapters, in order."""
        return tuple(sorted(self._loaded))

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def wanted(self, leg: int, adapter: Adapter) -> list[Effect]:
        """A leg needs an adapter. Ready or CannotUse follows, now or later."""
        assert leg not in self._legs
        self._legs[leg] = adapter
        self._waiting[leg] = None
        return self._advance()

    def left(self, leg: int) -> list[Effect]:
        """A leg no longer needs its adapter. Unknown legs are ignored."""
        if self._legs.pop(leg, None) is None:
            return []
        self._waiting.pop(leg, None)
        return self._advance()

    def keep(self, digests: Iterable[str]) -> list[Effect]:
        """Note the registered adapters. Others are unloaded as soon as no leg uses them."""
        self._kept = frozenset(digests)
        return self._advance()

    def was_loaded(self, digest: str) -> list[Effect]:
        self._moved(digest)
        self._loaded[digest] = None
        return self._advance()

    def failed(self, digest: str, why: str) -> list[Effect]:
        """An adapter could not be loaded, so the legs that wait for it cannot use it."""
        self._moved(digest)
        lost = [leg for leg in self._waiting if self._legs[leg].digest == digest]
        for leg in lost:
            del self._waiting[leg], self._legs[leg]
        return [*(CannotUse(leg, why) for leg in lost), *self._advance()]

    def was_unloaded(self, digest: str) -> list[Effect]:
        self._moved(digest)
        return self._advance()

    def _moved(self, digest: str) -> None:
        assert self._moving == digest, f"{digest} was not asked for"
        self._moving = None

    def _advance(self) -> list[Effect]:
        effects: list[Effect] = []
        for leg in list(self._waiting):
            digest = self._legs[leg].digest
            if digest in self._loaded:
                del self._waiting[leg]
                self._loaded.move_to_end(digest)
                effects.append(Ready(leg))
        if self._moving is None and (move := self._next_move()) is not None:
            effects.append(move)
        return effects

    def _next_move(self) -> Load | Unload | None:
        used = {adapter.digest for adapter in self._legs.values()}
        idle = [digest for digest in self._loaded if digest not in used]
        gone = [d for d in idle if self._kept is not None and d not in self._kept]
        wanted = self._legs[next(iter(self._waiting))] if self._waiting else None
        if wanted is not None and len(self._loaded) < self.num_slots:
            self._moving = wanted.digest
            return Load(wanted)
        leaving = gone or (idle if wanted is not None else [])
        if not leaving:
            return None
        self._moving = leaving[0]
        del self._loaded[leaving[0]]
        return Unload(leaving[0])

    def check_invariants(self) -> None:
        held = len(self._loaded) + (self._moving is not None)
        assert held <= self.num_slots
        assert self._waiting.keys() <= self._legs.keys()
        assert self._moving not in self._loaded
        for leg, adapter in self._legs.items():
            assert leg in self._waiting or adapter.digest in self._loaded
