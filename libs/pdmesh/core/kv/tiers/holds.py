"""Which blocks a pool evicts last, because sessions that use them have paused (for a tool).

A hold is of one block for one session, and ends with its time. Holds are bounded for the pool and
for each owner (a tenant, under one salt): a session that pauses beyond the bound holds nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

MAX_HOLD_S: Final = 600.0
MAX_SESSION_NAMES: Final = 8192  # blocks of one session, the head of its prompt first
MAX_SESSION_CHARS: Final = 256


class SessionState(StrEnum):
    """What a client says about its session in a request: what it does after the answer."""

    PAUSED_FOR_TOOL = "paused_for_tool"  # a tool runs, and then the session goes on
    RESUMED = "resumed"  # it goes on: nothing is held any more
    DONE = "done"  # no request follows


@dataclass(slots=True)
class Holds:
    """Times are in seconds of the caller's clock."""

    most: int
    most_of_owner: int
    _until: dict[bytes, dict[str, float]] = field(default_factory=dict)  # by block and session
    _num_of: dict[bytes, int] = field(default_factory=dict)  # holds by owner
    _owner_of: dict[str, bytes] = field(default_factory=dict)  # of each session that holds blocks
    _held_by: dict[str, set[bytes]] = field(default_factory=dict)

    def __len__(self) -> int:
        return sum(self._num_of.values())

    def __contains__(self, name: bytes) -> bool:
        return name in self._until

    def add(self, session: str, owner: bytes, names: Sequence[bytes], until: float) -> list[bytes]:
        """Hold these for a session that holds nothing yet. Returns those that no session held."""
        assert session not in self._held_by
        fresh: list[bytes] = []
        own = self._held_by.setdefault(session, set())
        self._owner_of[session] = owner
        for name in names:
            if name in own:
                continue
            if not self._has_room(owner):
                break
            if name not in self._until:
                fresh.append(name)
            own.add(name)
            self._num_of[owner] = self._num_of.get(owner, 0) + 1
            self._until.setdefault(name, {})[session] = until
        if not own:
            self._forget(session)
        return fresh

    def remove(self, session: str) -> list[bytes]:
        """End the session's holds. Returns the blocks that no session holds now."""
        ended = sorted(self._held_by.get(session, ()))
        return [name for name in ended if self._end(session, name)]

    def expire(self, now: float) -> list[bytes]:
        """End holds whose time is over. Returns the blocks that no session holds now."""
        over = [
            (session, name)
            for name, sessions in self._until.items()
            for session, until in sessions.items()
            if until <= now
        ]
        return [name for session, name in over if self._end(session, name)]

    def drop(self, name: bytes) -> None:
        """The block is gone."""
        for session in list(self._until.get(name, ())):
            self._end(session, name)

    def _has_room(self, owner: bytes) -> bool:
        return len(self) < self.most and self._num_of.get(owner, 0) < self.most_of_owner

    def _end(self, session: str, name: bytes) -> bool:
        """Whether no session holds the block now."""
        sessions, own = self._until[name], self._held_by[session]
        del sessions[session]
        own.remove(name)
        owner = self._owner_of[session]
        self._num_of[owner] -= 1
        if not self._num_of[owner]:
            del self._num_of[owner]
        if not own:
            self._forget(session)
        if not sessions:
            del self._until[name]
        return not sessions

    def _forget(self, session: str) -> None:
        self._held_by.pop(session, None)
        self._owner_of.pop(session, None)

    def check_invariants(self) -> None:
        pairs = {(s, n) for n, sessions in self._until.items() for s in sessions}
        assert pairs == {(s, n) for s, own in self._held_by.items() for n in own}
        assert len(pairs) == len(self) <= self.most
        assert all(0 < n <= self.most_of_owner for n in self._num_of.values())
        assert self._held_by.keys() == self._owner_of.keys()
        assert all(self._until.values())
        assert all(self._held_by.values())
