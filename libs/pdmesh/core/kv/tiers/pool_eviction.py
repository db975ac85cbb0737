"""Decides which block a full pool of KV blocks evicts, and tracks each block's slot (S78, S96).

Room for a new block is found in this order:
- a free slot;
- the least recently used block that no request has asked for again since it was stored;
- the least recently used block that some request has asked for again (a protected block);
- the least recently used block that is held for a paused session (`session_holds.py`).

A block that is being read is pinned and is not evicted. A block that many requests ask for, such as
one of a system prompt, is kept, which means that it is not evicted either. If there are too many
kept blocks, the least recently used of them becomes an ordinary block. Protected blocks and kept
blocks may each fill only a share of the pool, so that new blocks can stay for a while. An owner is
a tenant under one salt. If an owner has reached its quota, room for its new block is made among its
own blocks.

Blocks of a prefix that an operator pinned are called fixed here, and are not evicted. Fixed blocks
may fill only a share of the pool. Beyond this share, such a block is an ordinary one until there is
room.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pdmesh.core.kv.prefix.pins import PINNED_SHARE
from pdmesh.core.kv.tiers.session_holds import Holds


@dataclass(slots=True)
class _Entry:
    slot: int
    owner: bytes
    pins: int = 0  # how many readers use the block now
    num_uses: int = 0
    is_protected: bool = False  # asked for again since it was stored
    is_kept: bool = False
    is_fixed: bool = False  # the block is of a prefix that an operator pinned
    is_doomed: bool = False  # forgotten while pinned, and dropped with the last pin


@dataclass(slots=True)
class PoolBook:
    """The names, slots and order of a pool's blocks. The bytes are elsewhere.

    Each slot is free, reserved for a block that is being written, or has one block.
    """

    num_slots: int
    owner_share: float = 1.0  # the share of the slots that one owner may hold
    protected_share: float = 0.8
    kept_share: float = 0.25
    keep_after: int = 8  # uses of a block, after which it is kept
    fixed_share: float = PINNED_SHARE
    held_share: float = 0.25  # for held blocks: a share of the pool, and of an owner's quota
    # The share of all holds for one owner's sessions. A quarter leaves room for three other owners.
    owner_held_share: float = 0.25
    _free: list[int] = field(init=False)
    _entries: dict[bytes, _Entry] = field(default_factory=dict)
    _writing: dict[bytes, tuple[int, bytes]] = field(default_factory=dict)  # slot, owner
    # The next two have blocks that are neither in use nor kept, fixed or held. Oldest use first.
    _probation: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    _protected: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    _idle_of: dict[bytes, OrderedDict[bytes, None]] = field(default_factory=dict)  # by owner
    _holds: Holds = field(init=False)
    _held: OrderedDict[bytes, None] = field(default_factory=OrderedDict)  # held and not in use
    _num_of: dict[bytes, int] = field(default_factory=dict)  # slots by owner, reserved ones too
    _num_protected: int = 0
    _kept: OrderedDict[bytes, None] = field(default_factory=OrderedDict)  # the oldest use first
    _newly_kept: dict[bytes, None] = field(default_factory=dict)  # since `take_kept`
    _to_fix: dict[bytes, None] = field(default_factory=dict)  # names given to `fix`, stored or not
    _num_fixed: int = 0
    _stored: dict[bytes, None] = field(default_factory=dict)  # since `take_changes`
    _removed: dict[bytes, None] = field(default_factory=dict)
    num_evicted: int = 0
    num_pinned: int = 0  # blocks that are being read

    def __post_init__(self) -> None:
        self._free = list(range(self.num_slots - 1, -1, -1))
        most = int(self.held_share * self.num_slots)
        most_of_owner = min(
            int(self.held_share * self.max_owner_slots), int(self.owner_held_share * most)
        )
        self._holds = Holds(most, max(1, most_of_owner))

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: bytes) -> bool:
        entry = self._entries.get(name)
        return entry is not None and not entry.is_doomed

    @property
    def max_owner_slots(self) -> int:
        return max(1, int(self.owner_share * self.num_slots))

    def names(self) -> list[bytes]:
        return [name for name, entry in self._entries.items() if not entry.is_doomed]

    def held(self, names: Sequence[bytes]) -> int:
        """A mask of the positions in `names` whose block is in the pool."""
        mask = 0
        for position, name in enumerate(names):
            if name in self:
                mask |= 1 << position
        return mask

    def slot(self, name: bytes) -> int:
        return self._entries[name].slot

    # -- use --------------------------------------------------------------------------------------

    def pin(self, name: bytes) -> int | None:
        """The block's slot, which may be read until `unpin`. None if there is no such block."""
        entry = self._entries.get(name)
        if entry is None or entry.is_doomed:
            return None
        if entry.pins == 0:
            self._leave_idle(name, entry)
            self.num_pinned += 1
        entry.pins += 1
        return entry.slot

    def unpin(self, name: bytes, is_use: bool = True) -> None:
        """End one reading of the block, after which it is the most recently used one.

        `is_use` means that the block served a request. If so, the block becomes protected.
        """
        entry = self._entries[name]
        assert entry.pins > 0, "unpinned more often than pinned"
        entry.pins -= 1
        if is_use and not entry.is_doomed:
            self._note_use(name, entry)
        if entry.pins:
            return
        self.num_pinned -= 1
        if entry.is_doomed:
            self._drop(name, entry)
            return
        self._enter_idle(name, entry)
        self._demote()

    def _note_use(self, name: bytes, entry: _Entry) -> None:
        entry.num_uses += 1
        if not entry.is_protected:
            entry.is_protected = True
            self._num_protected += 1
        if entry.is_fixed:
            return
        if entry.is_kept:
            self._kept.move_to_end(name)
        elif entry.num_uses >= self.keep_after:
            self._keep(name, entry)

    def _keep(self, name: bytes, entry: _Entry) -> None:
        """Keep a block that has just been used.

        If too many blocks would be kept, the least recently used of them becomes an ordinary block.
        """
        if (most := int(self.kept_share * self.num_slots)) == 0:
            return
        if len(self._kept) >= most:
            oldest, _ = self._kept.popitem(last=False)
            self._unkeep(oldest)
        entry.is_kept = True
        self._kept[name] = self._newly_kept[name] = None

    def _unkeep(self, name: bytes) -> None:
        """End the keeping of a block that is no longer in `_kept`."""
        self._newly_kept.pop(name, None)
        entry = self._entries[name]
        entry.is_kept, entry.num_uses = False, 0
        if entry.pins == 0:
            self._enter_idle(name, entry)

    def touch(self, names: Sequence[bytes]) -> None:
        """Make these blocks, which are consecutive in one prompt, the most recently used ones.

        The first of them becomes the most recent, so the prompt's end is evicted before its
        beginning. No block becomes protected or kept.
        """
        for name in reversed(names):
            if name in self._probation:
                self._probation.move_to_end(name)
            elif name in self._protected:
                self._protected.move_to_end(name)
            elif name in self._kept:
                self._kept.move_to_end(name)
                continue
            elif name in self._held:
                self._held.move_to_end(name)
                continue
            else:
                continue
            self._idle_of[self._entries[name].owner].move_to_end(name)

    # -- sessions ---------------------------------------------------------------------------------

    def hold(self, session: str, owner: bytes, names: Sequence[bytes], until: float) -> None:
        """Hold blocks for a session that has paused, so that they are evicted last.

        A block that is not stored yet is held as soon as it is stored. `names` replace the names
        that the session held before. Holds are bounded by `held_share`, and those of all sessions
        of `owner` by `owner_held_share`. Here the owner is a tenant, whatever its salts. The first
        of `names` take precedence.
        """
        self._end_holds(self._holds.remove(session))
        for name in self._holds.add(session, owner, names, until, self.__contains__):
            entry = self._entries.get(name)
            if entry is not None and self._is_idle(entry):
                self._leave_idle(name, entry, was_held=False)
                self._enter_idle(name, entry)

    def resume(self, session: str) -> None:
        """End the holds of a session that continues."""
        self._end_holds(self._holds.remove(session))

    def retire(self, session: str, names: Sequence[bytes]) -> None:
        """Evict a session's blocks before all others, because the session is done.

        The end of a prompt is evicted before its beginning. Blocks that are kept or fixed, or that
        another session holds, are not changed.
        """
        self.resume(session)
        for name in names:
            entry = self._entries.get(name)
            if entry is None or entry.is_kept or entry.is_fixed or name in self._holds:
                continue
            entry.num_uses = 0
            if not self._is_idle(entry):
                continue
            self._leave_idle(name, entry)
            self._num_protected -= entry.is_protected
            entry.is_protected = False
            self._enter_idle(name, entry)
            self._probation.move_to_end(name, last=False)
            self._idle_of[entry.owner].move_to_end(name, last=False)

    def end_holds(self, now: float) -> None:
        """End the holds whose time is over."""
        self._end_holds(self._holds.expire(now))

    @property
    def num_held(self) -> int:
        """The number of holds: a block counts once for each paused session that holds it."""
        return len(self._holds)

    def _end_holds(self, names: Iterable[bytes]) -> None:
        """Turn blocks that no session holds any more into ordinary blocks."""
        for name in names:
            entry = self._entries.get(name)
            if entry is not None and self._is_idle(entry):
                self._leave_idle(name, entry, was_held=True)
                self._enter_idle(name, entry)
        self._demote()

    def _is_idle(self, entry: _Entry) -> bool:
        return not (entry.pins or entry.is_kept or entry.is_fixed)

    @property
    def num_fixed(self) -> int:
        return self._num_fixed

    def is_fixed(self, name: bytes) -> bool:
        return name in self and self._entries[name].is_fixed

    def fix(self, names: Iterable[bytes]) -> None:
        """Do not evict these blocks once they are stored, as far as `fixed_share` allows.

        The names replace those of the last call.
        """
        before, self._to_fix = self._to_fix, dict.fromkeys(names)
        for name in before:
            if name not in self._to_fix and (entry := self._entries.get(name)) is not None:
                self._unfix(name, entry)
        for name in self._to_fix:
            self._fix_if_room(name)
        self._demote()

    def _fix_if_room(self, name: bytes) -> None:
        entry = self._entries.get(name)
        if entry is None or entry.is_fixed or entry.is_doomed:
            return
        if self._num_fixed >= int(self.fixed_share * self.num_slots):
            return
        if entry.is_kept:
            del self._kept[name]
            self._newly_kept.pop(name, None)
            entry.is_kept = False
        elif entry.pins == 0:
            self._leave_idle(name, entry)
        entry.is_fixed = True
        self._num_fixed += 1

    def _unfix(self, name: bytes, entry: _Entry) -> None:
        if not entry.is_fixed:
            return
        entry.is_fixed = False
        self._num_fixed -= 1
        if entry.pins == 0:
            self._enter_idle(name, entry)

    def take_kept(self) -> tuple[bytes, ...]:
        """The blocks that became kept since the last call, for other tiers to keep, too."""
        names = tuple(self._newly_kept)
        self._newly_kept.clear()
        return names

    # -- coming and going -------------------------------------------------------------------------

    def reserve(self, name: bytes, owner: bytes) -> int | None:
        """A slot to write the block into. The block can be found after `commit`.

        None if the block is stored or being written already, or if no room can be made.
        """
        if name in self._entries or name in self._writing:
            return None
        slot: int | None = None
        if self._num_of.get(owner, 0) >= self.max_owner_slots:
            if not (own := self._idle_of.get(owner)):
                return None
            slot = self._evict(next(iter(own)))
        elif self._free:
            slot = self._free.pop()
        else:
            victims = self._probation or self._protected or self._held
            if not victims:
                return None
            slot = self._evict(next(iter(victims)))
        self._writing[name] = slot, owner
        self._num_of[owner] = self._num_of.get(owner, 0) + 1
        return slot

    def commit(self, name: bytes) -> None:
        """The block has been written and can be found from now on."""
        slot, owner = self._writing.pop(name)
        entry = self._entries[name] = _Entry(slot, owner)
        self._holds.arrive(name)
        self._enter_idle(name, entry)
        if name in self._to_fix:
            self._fix_if_room(name)
        if name in self._removed:
            del self._removed[name]
        else:
            self._stored[name] = None

    def abandon(self, name: bytes) -> None:
        """The block could not be written, so its slot is free again."""
        slot, owner = self._writing.pop(name)
        self._free.append(slot)
        self._count_out(owner)

    def forget(self, name: bytes) -> None:
        """Make a bad or unwanted block impossible to find.

        Its slot is free once nothing reads the block.
        """
        entry = self._entries.get(name)
        if entry is None or entry.is_doomed:
            return
        self._note_removed(name)
        if entry.pins:
            entry.is_doomed = True
            return
        self._leave_idle(name, entry)
        self._drop(name, entry)

    def take_changes(self) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """(stored, removed): the changes since the last call. A block that was both is left out."""
        changes = tuple(self._stored), tuple(self._removed)
        self._stored.clear()
        self._removed.clear()
        return changes

    # -- inside -----------------------------------------------------------------------------------

    def _evict(self, name: bytes) -> int:
        entry = self._entries[name]
        self._leave_idle(name, entry)
        self._note_removed(name)
        self._drop(name, entry)
        self.num_evicted += 1
        return self._free.pop()

    def _drop(self, name: bytes, entry: _Entry) -> None:
        del self._entries[name]
        self._num_protected -= entry.is_protected
        self._num_fixed -= entry.is_fixed
        if entry.is_kept:
            del self._kept[name]
            self._newly_kept.pop(name, None)
        self._holds.drop(name)
        self._free.append(entry.slot)
        self._count_out(entry.owner)

    def _note_removed(self, name: bytes) -> None:
        if name in self._stored:
            del self._stored[name]
        else:
            self._removed[name] = None

    def _count_out(self, owner: bytes) -> None:
        self._num_of[owner] -= 1
        if not self._num_of[owner]:
            del self._num_of[owner]

    def _enter_idle(self, name: bytes, entry: _Entry) -> None:
        if entry.is_kept or entry.is_fixed:
            return
        if name in self._holds:
            self._held[name] = None
            return
        (self._protected if entry.is_protected else self._probation)[name] = None
        self._idle_of.setdefault(entry.owner, OrderedDict())[name] = None

    def _leave_idle(self, name: bytes, entry: _Entry, was_held: bool | None = None) -> None:
        """Take an idle block out of its order of eviction.

        `was_held` says whether the block is in `_held`. If it is None, `_holds` decides.
        """
        if entry.is_kept or entry.is_fixed:
            return
        if name in self._holds if was_held is None else was_held:
            del self._held[name]
            return
        del (self._protected if entry.is_protected else self._probation)[name]
        own = self._idle_of[entry.owner]
        del own[name]
        if not own:
            del self._idle_of[entry.owner]

    def _demote(self) -> None:
        """If too many blocks are protected, end the protection of the least recently used."""
        while self._num_protected > int(self.protected_share * self.num_slots) and self._protected:
            name, _ = self._protected.popitem(last=False)
            self._entries[name].is_protected = False
            self._num_protected -= 1
            self._probation[name] = None

    def check_invariants(self) -> None:
        slots = [e.slot for e in self._entries.values()] + [s for s, _ in self._writing.values()]
        assert sorted(slots + self._free) == list(range(self.num_slots))
        assert self.num_pinned == sum(e.pins > 0 for e in self._entries.values())
        idle = {n for n, e in self._entries.items() if not (e.pins or e.is_kept or e.is_fixed)}
        held = {n for n in idle if n in self._holds}
        assert held == set(self._held)
        idle -= held
        assert idle == set(self._probation) | set(self._protected)
        self._holds.check_invariants()
        assert not set(self._probation) & set(self._protected)
        assert all(self._entries[n].is_protected for n in self._protected)
        assert not any(self._entries[n].is_protected for n in self._probation)
        assert self._num_protected == sum(e.is_protected for e in self._entries.values())
        assert set(self._kept) == {n for n, e in self._entries.items() if e.is_kept}
        assert set(self._newly_kept) <= set(self._kept)
        assert len(self._kept) <= int(self.kept_share * self.num_slots)
        fixed = {n for n, e in self._entries.items() if e.is_fixed}
        assert len(fixed) == self._num_fixed <= int(self.fixed_share * self.num_slots)
        assert fixed <= self._to_fix.keys()
        assert not fixed & self._kept.keys()
        owners: dict[bytes, int] = {}
        for owner in _owners(self._entries.values(), self._writing.values()):
            owners[owner] = owners.get(owner, 0) + 1
        assert owners == self._num_of
        assert all(n <= self.max_owner_slots for n in owners.values())
        assert not self._entries.keys() & self._writing.keys()
        by_owner: dict[bytes, set[bytes]] = {}
        for name in idle:
            by_owner.setdefault(self._entries[name].owner, set()).add(name)
        assert by_owner == {owner: set(own) for owner, own in self._idle_of.items()}


def _owners(entries: Iterable[_Entry], writing: Iterable[tuple[int, bytes]]) -> Iterable[bytes]:
    yield from (entry.owner for entry in entries)
    yield from (owner for _, owner in writing)
