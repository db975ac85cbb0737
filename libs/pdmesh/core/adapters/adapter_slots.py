"""Decides which LoRA adapters an engine loads into its few slots, and when it unloads them.

A leg is a request's stay on one instance. An adapter is loaded on its first use, and stays in its
slot while any leg uses it. If another adapter needs a slot, the least recently used one is
unloaded. The new adapter's files are copied and verified before that. An adapter that was removed
from the mesh is unloaded as soon as no leg uses it. Only one adapter is copied, loaded or unloaded
at a time.

A leg waits if there is no slot for its adapter. The instance accepts requests for no more adapters
than there are slots, so the leg waits only for legs that have just been aborted.

After a failed load, an adapter is not tried again for `FAILED_S`, unless an operator's inspection
finds it good. If each request caused a retry, a client could make the instance copy large files
again and again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from pdmesh.core.adapters.adapter import Adapter

FAILED_S: Final = 30.0
_MAX_FAILED: Final = 256


@dataclass(frozen=True, slots=True)
class FetchFiles:
    """Copy and verify the files of an adapter. The caller then calls `was_fetched` or `failed`."""

    adapter: Adapter


@dataclass(frozen=True, slots=True)
class Load:
    """Load a fetched adapter into a slot. The caller then calls `was_loaded` or `failed`."""

    adapter: Adapter


@dataclass(frozen=True, slots=True)
class Unload:
    """Unload an adapter. The caller then calls `was_unloaded`."""

    digest: str


@dataclass(frozen=True, slots=True)
class Discard:
    """Delete fetched files that no leg needs any more. The caller then calls `was_discarded`."""

    digest: str


@dataclass(frozen=True, slots=True)
class Ready:
    """The leg's adapter is loaded, and stays loaded until the leg has left."""

    leg: int


@dataclass(frozen=True, slots=True)
class CannotUse:
    """The leg's adapter could not be loaded. AdapterSlots has forgotten the leg.

    `is_final` means that no other instance can load the adapter either.
    """

    leg: int
    why: str
    is_final: bool = False


@dataclass(frozen=True, slots=True)
class _Failure:
    why: str
    until: float  # when the failure is forgotten
    is_final: bool


Move = FetchFiles | Load | Unload | Discard
Effect = Move | Ready | CannotUse


@dataclass(slots=True)
class AdapterSlots:
    num_slots: int
    _legs: dict[int, Adapter] = field(default_factory=dict)  # including legs that wait
    _waiting: dict[int, None] = field(default_factory=dict)  # in order of arrival
    # The most recently used is last.
    _loaded: OrderedDict[str, None] = field(default_factory=OrderedDict)
    _fetched: Adapter | None = None  # the adapter that waits for a slot
    _move: Move | None = None  # the change that is under way
    _kept: frozenset[str] | None = None  # the registered adapters; None: not known yet
    # By digest and path; the oldest is first.
    _failed: OrderedDict[tuple[str, str], _Failure] = field(default_factory=OrderedDict)

    @property
    def loaded(self) -> tuple[str, ...]:
        """The digests of the loaded adapters, sorted."""
        return tuple(sorted(self._loaded))

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def wanted(self, leg: int, adapter: Adapter, now: float) -> list[Effect]:
        """A leg needs an adapter. This call or a later one returns Ready or CannotUse for
        the leg.
        """
        assert leg not in self._legs
        failure = self._failed.get(_content(adapter))
        if failure is not None and now < failure.until and adapter.digest not in self._loaded:
            return [CannotUse(leg, failure.why, failure.is_final)]
        self._legs[leg] = adapter
        self._waiting[leg] = None
        return self._advance()

    def left(self, leg: int) -> list[Effect]:
        """The leg has ended. An unknown leg is ignored."""
        if self._legs.pop(leg, None) is None:
            return []
        self._waiting.pop(leg, None)
        return self._advance()

    def keep(self, digests: Iterable[str]) -> list[Effect]:
        """Set the registered adapters. Any other adapter is unloaded as soon as no leg uses it."""
        self._kept = frozenset(digests)
        return self._advance()

    def was_found_good(self, digest: str) -> None:
        """Forget an adapter's failures, because the adapter has passed an operator's inspection."""
        for content in [content for content in self._failed if content[0] == digest]:
            del self._failed[content]

    def was_fetched(self, adapter: Adapter) -> list[Effect]:
        self._moved(FetchFiles(adapter))
        self._fetched = adapter
        return self._advance()

    def was_loaded(self, adapter: Adapter) -> list[Effect]:
        self._moved(Load(adapter))
        self._loaded[adapter.digest] = None
        return self._advance()

    def failed(
        self, adapter: Adapter, why: str, now: float, *, is_final: bool = False
    ) -> list[Effect]:
        """An adapter could not be fetched or loaded, so the legs that wait for it cannot use it."""
        assert self._move in (FetchFiles(adapter), Load(adapter))
        self._move = None
        self._failed.pop(_content(adapter), None)
        self._failed[_content(adapter)] = _Failure(why, now + FAILED_S, is_final)
        if len(self._failed) > _MAX_FAILED:
            self._failed.popitem(last=False)
        lost = [leg for leg in self._waiting if _content(self._legs[leg]) == _content(adapter)]
        for leg in lost:
            del self._waiting[leg], self._legs[leg]
        return [*(CannotUse(leg, why, is_final) for leg in lost), *self._advance()]

    def was_unloaded(self, digest: str) -> list[Effect]:
        self._moved(Unload(digest))
        return self._advance()

    def was_discarded(self, digest: str) -> list[Effect]:
        self._moved(Discard(digest))
        return self._advance()

    def _moved(self, move: Move) -> None:
        assert self._move == move, f"{move} was not asked for"
        self._move = None

    def _advance(self) -> list[Effect]:
        effects: list[Effect] = []
        for leg in list(self._waiting):
            digest = self._legs[leg].digest
            if digest in self._loaded:
                del self._waiting[leg]
                self._loaded.move_to_end(digest)
                effects.append(Ready(leg))
        if self._move is None and (move := self._next_move()) is not None:
            self._move = move
            effects.append(move)
        return effects

    def _next_move(self) -> Move | None:
        used = {adapter.digest for adapter in self._legs.values()}
        idle = [digest for digest in self._loaded if digest not in used]
        gone = [d for d in idle if self._kept is not None and d not in self._kept]
        if gone:
            return self._unload(gone[0])
        fetched = self._fetched
        if fetched is None:
            return FetchFiles(self._legs[next(iter(self._waiting))]) if self._waiting else None
        if fetched.digest not in used:
            self._fetched = None
            return Discard(fetched.digest)
        if len(self._loaded) < self.num_slots:
            self._fetched = None
            return Load(fetched)
        return self._unload(idle[0]) if idle else None

    def _unload(self, digest: str) -> Unload:
        del self._loaded[digest]
        return Unload(digest)

    def check_invariants(self) -> None:
        assert len(self._loaded) + isinstance(self._move, Load | Unload) <= self.num_slots
        assert self._waiting.keys() <= self._legs.keys()
        assert self._fetched is None or self._fetched.digest not in self._loaded
        assert len(self._failed) <= _MAX_FAILED
        for leg, adapter in self._legs.items():
            assert leg in self._waiting or adapter.digest in self._loaded


def _content(adapter: Adapter) -> tuple[str, str]:
    """The key of a failure.

    It includes the path, because equal content may be readable in another folder.
    """
    return adapter.digest, adapter.path
