"""Decides which KV blocks are held for a paused session, where, and how many (S108).

A session is a chat that stops for a tool call and continues later. A hold keeps one KV block for
one session: until the hold's time is over, the instance's pool evicts the block last. The number of
holds is bounded for the pool and for each owner (a tenant). Blocks beyond these bounds are not
held.

A session may name blocks that are not stored yet. The session awaits these blocks, within bounds of
the same size. When such a block is stored, it is held if there is room.

When a client's call has ended, the gateway tells the instances that served the call whether the
session pauses. The session's next turn may run on other instances. So the gateway remembers which
instances know of the pause, and tells them when the session continues or is done. A gateway that
did not see the pause does not know these instances. If the next turn comes through such a gateway,
the holds end when their time is over.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

MAX_HOLD_S: Final = 600.0
MAX_SESSION_NAMES: Final = 8192  # blocks of one session, from the start of its prompt
MAX_SESSION_CHARS: Final = 256
MAX_PAUSED: Final = 16_384  # sessions whose instances a gateway remembers
MAX_TOLD: Final = 16  # the latest instances of one session that a gateway remembers


class SessionState(StrEnum):
    """What a session does after the answer, as its client says in a request."""

    PAUSED_FOR_TOOL = "paused_for_tool"  # a tool runs, and then the session goes on
    RESUMED = "resumed"  # the session continues, and nothing is held any more
    DONE = "done"  # no request follows


# --- at the gateway: which instances hold which blocks -------------------------------------------


@dataclass(frozen=True, slots=True)
class _Pause:
    """The instances that were told that a session has paused."""

    instance_ids: tuple[str, ...]
    until: float  # all holds of the session have ended at this time


@dataclass(slots=True)
class PausedSessions:
    """The sessions whose pauses a gateway has reported. A pause holds blocks for `hold_s`.

    Times are in seconds, on the caller's clock.
    """

    hold_s: float
    max_paused: int = MAX_PAUSED
    # By the session's key, in the order in which the sessions paused and their holds end.
    _pauses: OrderedDict[str, _Pause] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._pauses)

    def ended(
        self, session: str, state: SessionState, told: Sequence[str], now: float
    ) -> Sequence[str]:
        """Record that a call of the session has ended and that the instances in `told` know it.

        If the session continues or is done, returns the other instances that know of an earlier
        pause. The caller must tell them the new state, without blocks. If the session has paused
        again, returns nothing.
        """
        has_paused = state is SessionState.PAUSED_FOR_TOOL
        if has_paused and not told:
            return ()
        before = [i for i in self._forget(session, now) if i not in told]
        if not has_paused:
            return before
        self._remember(session, (*before, *told), now)
        return ()

    def _remember(self, session: str, instance_ids: Sequence[str], now: float) -> None:
        self._pauses[session] = _Pause(tuple(instance_ids[-MAX_TOLD:]), now + self.hold_s)
        while self._pauses:
            first = next(iter(self._pauses.values()))
            if len(self._pauses) <= self.max_paused and first.until > now:
                break
            self._pauses.popitem(last=False)

    def _forget(self, session: str, now: float) -> tuple[str, ...]:
        """The instances that were told of the session's pause and may still hold its blocks."""
        pause = self._pauses.pop(session, None)
        return pause.instance_ids if pause is not None and pause.until > now else ()


def held_blocks(
    prompts: Iterable[Sequence[bytes]], num_choices: int, answer: Callable[[], Sequence[bytes]]
) -> list[bytes]:
    """The names of the blocks that an instance should hold for a session, prompts first.

    `prompts` has the block names of the prompts that the instance served. If the call asks for one
    answer, the blocks of the `answer` are held as well. If it asks for several (`num_choices`), no
    answer is held, because the client continues with at most one of them.
    """
    blocks = dict.fromkeys(name for prompt in prompts for name in prompt)
    if num_choices == 1:
        blocks.update(dict.fromkeys(answer()))
    return list(blocks)[:MAX_SESSION_NAMES]


# --- in an instance's pool -----------------------------------------------------------------------


@dataclass(slots=True)
class _Budget:
    """Counts holds, or awaited blocks, against the bounds `most` and `most_of_owner`."""

    most: int
    most_of_owner: int
    num: int = 0
    num_of: dict[bytes, int] = field(default_factory=dict)

    def has_room(self, owner: bytes) -> bool:
        return self.num < self.most and self.num_of.get(owner, 0) < self.most_of_owner

    def take(self, owner: bytes) -> bool:
        """Count one more for the owner. False if a bound is reached."""
        if not self.has_room(owner):
            return False
        self.num += 1
        self.num_of[owner] = self.num_of.get(owner, 0) + 1
        return True

    def give_back(self, owner: bytes) -> None:
        self.num -= 1
        self.num_of[owner] -= 1
        if not self.num_of[owner]:
            del self.num_of[owner]


@dataclass(slots=True)
class _Paused:
    """A paused session. `held` is in the order in which the session named or got the blocks."""

    owner: bytes
    until: float
    held: dict[bytes, None] = field(default_factory=dict)
    awaited: dict[bytes, None] = field(default_factory=dict)


@dataclass(slots=True)
class Holds:
    """The holds in one pool. Times are in seconds of the caller's clock."""

    most: int
    most_of_owner: int
    _held: _Budget = field(init=False)
    _awaited: _Budget = field(init=False)
    _sessions: dict[str, _Paused] = field(default_factory=dict)  # each holds or awaits a block
    _holders: dict[bytes, dict[str, None]] = field(default_factory=dict)  # sessions by block
    _awaiters: dict[bytes, dict[str, None]] = field(default_factory=dict)
    # (until, session), the earliest first. Sessions that have continued may still be here.
    _times: list[tuple[float, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._held = _Budget(self.most, self.most_of_owner)
        self._awaited = _Budget(self.most, self.most_of_owner)

    def __len__(self) -> int:
        return self._held.num

    def __contains__(self, name: bytes) -> bool:
        return name in self._holders

    def add(
        self,
        session: str,
        owner: bytes,
        names: Sequence[bytes],
        until: float,
        is_stored: Callable[[bytes], bool],
    ) -> list[bytes]:
        """Hold `names` for a session that holds nothing, and await those that are not stored yet.

        Returns the names that no session held before.
        """
        assert session not in self._sessions
        fresh: list[bytes] = []
        paused = _Paused(owner, until)
        for name in names:
            if name in paused.held or name in paused.awaited:
                continue
            if not is_stored(name):
                if self._awaited.take(owner):
                    paused.awaited[name] = None
                    self._awaiters.setdefault(name, {})[session] = None
            elif self._held.take(owner):
                if name not in self._holders:
                    fresh.append(name)
                self._hold(session, paused, name)
            elif not self._awaited.has_room(owner):
                break
        if paused.held or paused.awaited:
            self._sessions[session] = paused
            heapq.heappush(self._times, (until, session))
            self._tidy_times()
        return fresh

    def arrive(self, name: bytes) -> None:
        """The block is stored now. Sessions that awaited it hold it, as far as there is room."""
        for session in self._awaiters.pop(name, ()):
            paused = self._sessions[session]
            del paused.awaited[name]
            self._awaited.give_back(paused.owner)
            if self._held.take(paused.owner):
                self._hold(session, paused, name)
            else:
                self._forget_if_empty(session, paused)

    def remove(self, session: str) -> list[bytes]:
        """End all holds of the session.

        Returns the blocks that no session holds any more, in reverse order, so that the end of a
        prompt is evicted before its beginning.
        """
        if (paused := self._sessions.pop(session, None)) is None:
            return []
        for name in paused.awaited:
            _take_out(self._awaiters, name, session)
            self._awaited.give_back(paused.owner)
        for name in paused.held:
            _take_out(self._holders, name, session)
            self._held.give_back(paused.owner)
        return [name for name in reversed(paused.held) if name not in self._holders]

    def expire(self, now: float) -> list[bytes]:
        """End the holds whose time is over. Returns the blocks that no session holds any more."""
        ended: list[bytes] = []
        while self._times and self._times[0][0] <= now:
            until, session = heapq.heappop(self._times)
            paused = self._sessions.get(session)
            if paused is not None and paused.until == until:
                ended += self.remove(session)
        return ended

    def drop(self, name: bytes) -> None:
        """End all holds of a block that has left the pool."""
        for session in self._holders.pop(name, ()):
            paused = self._sessions[session]
            del paused.held[name]
            self._held.give_back(paused.owner)
            self._forget_if_empty(session, paused)

    def _hold(self, session: str, paused: _Paused, name: bytes) -> None:
        paused.held[name] = None
        self._holders.setdefault(name, {})[session] = None

    def _forget_if_empty(self, session: str, paused: _Paused) -> None:
        if not (paused.held or paused.awaited):
            del self._sessions[session]

    def _tidy_times(self) -> None:
        """If there are many entries of sessions that have continued, drop them from `_times`."""
        if len(self._times) > 2 * len(self._sessions) + 64:
            self._times = [(paused.until, s) for s, paused in self._sessions.items()]
            heapq.heapify(self._times)

    def check_invariants(self) -> None:
        paused = self._sessions
        held = {(s, n) for s, p in paused.items() for n in p.held}
        awaited = {(s, n) for s, p in paused.items() for n in p.awaited}
        assert held == {(s, n) for n, sessions in self._holders.items() for s in sessions}
        assert awaited == {(s, n) for n, sessions in self._awaiters.items() for s in sessions}
        assert all(p.held or p.awaited for p in paused.values())
        assert all(self._holders.values())
        assert all(self._awaiters.values())
        assert {(p.until, s) for s, p in paused.items()} <= set(self._times)
        for budget, pairs in ((self._held, held), (self._awaited, awaited)):
            owners = Counter(paused[session].owner for session, _ in pairs)
            assert budget.num_of == dict(owners)
            assert budget.num == len(pairs) <= self.most
            assert all(n <= self.most_of_owner for n in owners.values())


def _take_out(sessions_of: dict[bytes, dict[str, None]], name: bytes, session: str) -> None:
    sessions = sessions_of[name]
    del sessions[session]
    if not sessions:
        del sessions_of[name]
