"""Which adapters an engine holds: loaded on first use, unloaded for another one or when removed.

An engine has few slots. An adapter in a slot stays while any leg uses it; the one that was used
least recently makes room for another, once the files of that one are here and verified. One thing
changes at a time. A leg whose adapter finds no room waits: admission lets in no more adapters than
there are slots, so it waits only for legs that have just been aborted.

What cannot be loaded is not tried again for `FAILED_S`: its files may be large, and a client may
ask for it as often as it likes.
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
    """Copy and verify its files. Answered by `was_fetched` or `failed`."""

    adapter: Adapter


@dataclass(frozen=True, slots=True)
class Load:
    """Put what was fetched into a slot. Answered by `was_loaded` or `failed`."""

    adapter: Adapter


@dataclass(frozen=True, slots=True)
class Unload:
    """Answered by `was_unloaded`."""

    digest: str


@dataclass(frozen=True, slots=True)
class Discard:
    """No leg wants the files that were fetched any more. Answered by `was_discarded`."""

    digest: str


@dataclass(frozen=True, slots=True)
class Ready:
    """The leg's adapter is loaded, and stays until the leg has left."""

    leg: int


@dataclass(frozen=True, slots=True)
class CannotUse:
    """The leg's adapter could not be loaded. The leg has left by that."""

    leg: int
    why: str


Move = FetchFiles | Load | Unload | Discard
Effect = Move | Ready | CannotUse


@dataclass(slots=True)
class AdapterShelf:
    num_slots: int
    _legs: dict[int, Adapter] = field(default_factory=dict)  # those that wait, too
    _waiting: dict[int, None] = field(default_factory=dict)  # in order of arrival
    _loaded: OrderedDict[str, None] = field(default_factory=OrderedDict)  # last used, last
    _fetched: Adapter | None = None  # waits for a slot
    _move: Move | None = None  # is under way
    _kept: frozenset[str] | None = None  # what is registered; None: not known yet
    # Why, and until when it is believed; the oldest first.
    _failed: OrderedDict[tuple[str, str], tuple[str, float]] = field(default_factory=OrderedDict)

    @property
    def loaded(self) -> tuple[str, ...]:
        """Digests, in order."""
        return tuple(sorted(self._loaded))

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def wanted(self, leg: int, adapter: Adapter, now: float) -> list[Effect]:
        """A leg needs an adapter; answered by Ready or CannotUse, perhaps later."""
        assert leg not in self._legs
        why, until = self._failed.get(_content(adapter), ("", 0.0))
        if now < until and adapter.digest not in self._loaded:
            return [CannotUse(leg, why)]
        self._legs[leg] = adapter
        self._waiting[leg] = None
        return self._advance()

    def left(self, leg: int) -> list[Effect]:
        """The leg needs its adapter no more; unknown ones are ignored."""
        if self._legs.pop(leg, None) is None:
            return []
        self._waiting.pop(leg, None)
        return self._advance()

    def keep(self, digests: Iterable[str]) -> list[Effect]:
        """These are registered: others are unloaded as soon as no leg uses them."""
        self._kept = frozenset(digests)
        return self._advance()

    def was_found_good(self, digest: str) -> None:
        """An operator had it looked at: a failure from before says nothing any more."""
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

    def failed(self, adapter: Adapter, why: str, now: float) -> list[Effect]:
        """It could not be fetched or loaded: the legs that wait for it are told."""
        assert self._move in (FetchFiles(adapter), Load(adapter))
        self._move = None
        self._failed.pop(_content(adapter), None)
        self._failed[_content(adapter)] = why, now + FAILED_S
        if len(self._failed) > _MAX_FAILED:
            self._failed.popitem(last=False)
        lost = [leg for leg in self._waiting if _content(self._legs[leg]) == _content(adapter)]
        for leg in lost:
            del self._waiting[leg], self._legs[leg]
        return [*(CannotUse(leg, why) for leg in lost), *self._advance()]

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
    """What decides whether it can be loaded: the same files may be broken elsewhere alone."""
    return adapter.digest, adapter.path
