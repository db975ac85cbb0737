"""Indexes the KV blocks of instances, and finds how much of a prompt each has (S98, S99, S102).

The index maps each block to a bitmask of its holders. Instances report changes as numbered deltas.
The deltas of one incarnation (one life of an instance) apply in order. Deltas beyond a gap wait
until the gap is filled, or until a snapshot, which lists all blocks of the instance, covers the
gap. At most `MAX_WAITING` deltas wait. A match counts blocks from the start of the prompt. It ends
at the first block that the instance lacks, because later blocks are useless without that block.

An instance keeps blocks in two tiers: its engine, and its host pool, which is in host memory. In
the bitmask, each instance has two neighbouring bits, one for each tier. One shift of the mask
therefore finds all holders in either tier. A block's name is stored once, and everything else
refers to the block by a row number. Equal masks are one object, so comparing the holders of
successive blocks is a comparison of pointers.

Loading a snapshot or removing an instance takes long if the instance has very many blocks. Both can
be done in steps (`begin_snapshot`, `SnapshotLoad.step`, `retire_instance`, `sweep`), so that an
event loop can do other work between two steps.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from pdmesh.core.kv.tier import Tier

TIERS: Final = (Tier.ENGINE, Tier.HOST)  # an instance's own tiers, in the order of its two bits
MAX_WAITING = 256  # deltas kept beyond a gap, per instance
_MAX_RETIRED = 4  # incarnations that are over and still remembered, per instance
_MAX_INTERNED = 16_384
_FEW = 8  # up to this many bits of a mask are read one by one
_MAX_REMEMBERED = 1024  # masks whose instance ids are cached
_ALL: Final = 1 << 60
_MANY: Final = 65_536
_GONE = "\0"  # replaces the id of an instance that is gone, until its blocks are swept
_SWEPT_WITH_A_DELTA = 256  # with each delta, so many blocks of gone instances are dropped


class DeltaOutcome(enum.Enum):
    APPLIED = "applied"
    STALE = "stale"  # the delta was repeated or late, or its incarnation is over
    GAP = "gap"  # earlier deltas are missing, so the caller should load a snapshot
    WAITS = "waits"  # the delta is applied after the snapshot that is being loaded


@dataclass(frozen=True, slots=True)
class TierDelta:
    """The changes in one tier. `is_cleared` applies first, then `removed`, then `stored`."""

    removed: Sequence[bytes] = ()
    stored: Sequence[bytes] = ()
    is_cleared: bool = False


@dataclass(frozen=True, slots=True)
class IndexDelta:
    """The changes in one instance.

    `removed`, `stored` and `is_cleared` are about the engine's blocks, `host` about the host pool.
    """

    instance_id: str
    incarnation: int
    sequence: int  # from 1
    removed: Sequence[bytes] = ()
    stored: Sequence[bytes] = ()
    is_cleared: bool = False
    host: TierDelta | None = None

    @property
    def clears(self) -> bool:
        return self.is_cleared or (self.host is not None and self.host.is_cleared)


@dataclass(frozen=True, slots=True)
class PeerRuns:
    """Ranges (first, end) of a prompt's blocks. Each block in a range is in some host pool."""

    runs: tuple[tuple[int, int], ...] = ()

    def reach(self, num_held: int) -> int:
        """How many blocks from the start an instance has after fetching from its peers.

        `num_held` is how many blocks from the start the instance holds itself.
        """
        for first, end in self.runs:
            if first <= num_held < end:
                return end
        return num_held


NO_PEERS: Final = PeerRuns()


@dataclass(slots=True)
class _Holder:
    slot: int
    incarnation: int
    sequence: int = 0
    # One set for each of TIERS.
    rows: tuple[set[int], set[int]] = field(default_factory=lambda: (set(), set()))
    # While a snapshot is loaded: older rows that the snapshot has not named so far.
    before: tuple[set[int], set[int]] = field(default_factory=lambda: (set(), set()))
    load: SnapshotLoad | None = None
    waiting: dict[int, IndexDelta] = field(default_factory=dict)
    is_whole: bool = True  # as far as this index can tell, no delta is missing
    bits: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        self.bits = (1 << 2 * self.slot, 2 << 2 * self.slot)

    @property
    def num_blocks(self) -> int:
        return sum(map(len, (*self.rows, *self.before)))

    def forget(self, rank: int, row: int) -> None:
        """Drop the row from `rows` or, if `rows` does not have it, from `before`."""
        own, before = self.rows[rank], self.before[rank]
        (own if row in own else before).remove(row)


@dataclass(slots=True)
class SnapshotLoad:
    """A snapshot that is being loaded. Call `step` until it returns an outcome.

    Until the load ends, the index has some of the instance's old blocks and some of the snapshot's.
    `PrefixIndex.version` still returns the old version, and deltas of the instance wait.
    """

    instance_id: str
    sequence: int
    _index: PrefixIndex
    holder: _Holder
    names: tuple[Iterator[bytes], Iterator[bytes]]  # one for each of TIERS
    rank: int = 0

    def step(self, max_blocks: int) -> DeltaOutcome | None:
        """Load or drop at most `max_blocks` blocks. None means that more steps are needed.

        STALE means that the instance is gone, or that the load of another snapshot has begun. GAP
        means that deltas after the snapshot are still missing.
        """
        if self.holder.load is not self:
            return DeltaOutcome.STALE
        while self.rank < len(TIERS):
            max_blocks -= self._index.take_names(self, max_blocks)
            if max_blocks <= 0:
                return None
            self.rank += 1
        if self._index.drop_unnamed(self.holder, max_blocks) >= max_blocks:
            return None
        return self._index.end_snapshot(self)


@dataclass(slots=True)
class PrefixIndex:
    """The index, bounded by `max_blocks` entries.

    There is one entry for each block, instance and tier. When the index is full, the clock
    algorithm (an approximation of LRU) evicts a block that no prompt has asked for lately. An
    eviction may cost a cache hit, but never causes a wrong one. `take_forgotten` reports evictions.
    """

    max_blocks: int = 8_000_000
    num_blocks: int = 0
    num_evicted: int = 0  # entries evicted because the index was full
    num_host_blocks: int = 0  # entries for host pools
    _rows: dict[bytes, int] = field(default_factory=dict)
    _names: list[bytes | None] = field(default_factory=list)  # by row
    _masks: list[int] = field(default_factory=list)  # by row
    # By row: whether a prompt asked for the block since the clock's hand last passed the row.
    _is_used: bytearray = field(default_factory=bytearray)
    _free: list[int] = field(default_factory=list)
    _hand: int = 0
    _pinned: frozenset[bytes] = frozenset()
    _interned: dict[int, int] = field(default_factory=dict)
    _instances: dict[str, _Holder] = field(default_factory=dict)
    _ids: list[str] = field(default_factory=list)  # by slot, "" if free
    _by_slot: list[_Holder | None] = field(default_factory=list)
    _gone: list[_Holder] = field(default_factory=list)  # `sweep` drops their blocks
    _ids_of: dict[int, tuple[str, ...]] = field(default_factory=dict)  # by a mask of engine bits
    _everyone: int = 0  # the engine bits of all instances
    _retired: dict[str, list[int]] = field(default_factory=dict)
    _forgotten: dict[str, tuple[list[bytes], list[bytes]]] = field(default_factory=dict)

    def instance_ids(self) -> list[str]:
        return sorted(self._instances)

    def version(self, instance_id: str) -> tuple[int, int] | None:
        """The (incarnation, sequence) of the last delta or snapshot that the index has applied."""
        holder = self._instances.get(instance_id)
        return (holder.incarnation, holder.sequence) if holder else None

    def is_loading(self, instance_id: str) -> bool:
        """Whether a snapshot of the instance is being loaded, so old and new blocks are mixed."""
        holder = self._instances.get(instance_id)
        return holder is not None and holder.load is not None

    def is_whole(self, instance_id: str) -> bool:
        """False while deltas of the instance are missing, or if the instance is unknown."""
        holder = self._instances.get(instance_id)
        return holder is not None and holder.is_whole

    def blocks(self, instance_id: str, tier: Tier = Tier.ENGINE) -> frozenset[bytes]:
        holder = self._instances.get(instance_id)
        if holder is None:
            return frozenset()
        rank = TIERS.index(tier)
        names = map(self._name, (*holder.rows[rank], *holder.before[rank]))
        return frozenset(names)

    def num_blocks_of(self, instance_id: str) -> int:
        """The number of blocks in all tiers. Fast, since each scoring of an instance calls it."""
        holder = self._instances.get(instance_id)
        if holder is None:
            return 0
        if holder.load is not None:
            return holder.num_blocks
        engine, host = holder.rows
        return len(engine) + len(host)

    def apply(self, delta: IndexDelta) -> DeltaOutcome:
        """Apply a delta, or keep it until it can be applied.

        GAP means that deltas are still missing, before this one or before a kept one.
        """
        self.sweep(_SWEPT_WITH_A_DELTA)
        holder = self._holder_for(delta.instance_id, delta.incarnation)
        if holder is None or delta.sequence <= holder.sequence:
            return DeltaOutcome.STALE
        if holder.load is not None:
            if delta.sequence <= holder.load.sequence:
                return DeltaOutcome.STALE
            was_whole = holder.is_whole  # `_wait` sets `is_whole` to False, but no delta is missing
            self._wait(holder, delta)
            holder.is_whole = was_whole
            return DeltaOutcome.WAITS
        if delta.sequence > holder.sequence + 1:
            self._wait(holder, delta)
            return DeltaOutcome.GAP
        self._change(holder, delta)
        return self._drain(holder)

    def load_snapshot(
        self,
        instance_id: str,
        incarnation: int,
        sequence: int,
        blocks: Iterable[bytes],
        host: Iterable[bytes] = (),
    ) -> DeltaOutcome:
        """Replace the instance's blocks with `blocks` and `host`, which it held at `sequence`.

        The call takes about a second for a million blocks. `begin_snapshot` does the same in steps.
        GAP means that deltas after the snapshot are still missing.
        """
        load = self.begin_snapshot(instance_id, incarnation, sequence, blocks, host)
        outcome: DeltaOutcome | None = DeltaOutcome.STALE
        while load is not None and (outcome := load.step(_MANY)) is None:
            pass
        assert outcome is not None
        return outcome

    def begin_snapshot(
        self,
        instance_id: str,
        incarnation: int,
        sequence: int,
        blocks: Iterable[bytes],
        host: Iterable[bytes] = (),
    ) -> SnapshotLoad | None:
        """Like `load_snapshot`, but in steps. None means that the snapshot is stale."""
        holder = self._holder_for(instance_id, incarnation)
        if holder is None or sequence < holder.sequence:
            return None
        if holder.load is not None:  # this snapshot replaces one whose load has not ended
            for own, before in zip(holder.rows, holder.before, strict=True):
                own.update(before)
                before.clear()
        holder.rows, holder.before = holder.before, holder.rows
        holder.load = SnapshotLoad(instance_id, sequence, self, holder, (iter(blocks), iter(host)))
        return holder.load

    def remove_instance(self, instance_id: str) -> int:
        """Forget an instance that is gone, and return how many blocks it had.

        The call takes time in proportion to these blocks. The instance's incarnation is refused
        from now on, unless `forget_history` is called.
        """
        num_blocks = self.retire_instance(instance_id)
        self.sweep(_ALL)
        return num_blocks

    def retire_instance(self, instance_id: str) -> int:
        """Like `remove_instance`, but fast: the blocks occupy room until `sweep` drops them."""
        holder = self._instances.pop(instance_id, None)
        if holder is None:
            return 0
        holder.load = None
        self._everyone &= ~holder.bits[0]
        self._ids[holder.slot] = _GONE
        self._ids_of.clear()
        self._gone.append(holder)
        self._forgotten.pop(instance_id, None)
        self._retire(instance_id, holder.incarnation)
        return holder.num_blocks

    def sweep(self, max_blocks: int) -> bool:
        """Drop at most `max_blocks` blocks of instances that are gone. True if some are left."""
        while self._gone and max_blocks > 0:
            holder = self._gone[-1]
            max_blocks -= self._drop_some(holder, (*holder.rows, *holder.before), max_blocks)
            if not holder.num_blocks:
                self._gone.pop()
                self._ids[holder.slot] = ""
                self._by_slot[holder.slot] = None
        return bool(self._gone)

    def forget_history(self, instance_id: str) -> None:
        """Accept removed incarnations again: one whose lease has ended may still be alive."""
        self._retired.pop(instance_id, None)

    def match(self, block_hashes: Sequence[bytes], tier: Tier | None = None) -> dict[str, int]:
        """For each instance that holds the first block, how many blocks it holds without a gap.

        If `tier` is None, a block counts if it is in either of the instance's own tiers. Otherwise
        it counts only in `tier`.
        """
        rows, masks, is_used = self._rows, self._masks, self._is_used
        matches: dict[str, int] = {}
        candidates, last, length = self._everyone, -1, 0
        for block in block_hashes:
            row = rows.get(block)
            if row is None:
                break
            is_used[row] = 1
            mask = masks[row]
            if mask is not last:
                last = mask
                still = candidates & self._in_tier(mask, tier)
                if still != candidates:
                    if length:
                        self._note(matches, candidates & ~still, length)
                    candidates = still
                    if not candidates:
                        return matches
            length += 1
        if length:
            self._note(matches, candidates, length)
        return matches

    def peer_runs(self, block_hashes: Sequence[bytes]) -> PeerRuns:
        """The runs of a prompt's blocks in host pools. Peers fetch from no other tier (S77)."""
        if not self.num_host_blocks:
            return NO_PEERS
        rows, masks, in_host = self._rows, self._masks, self._everyone << 1
        runs: list[tuple[int, int]] = []
        first = -1
        for position, block in enumerate(block_hashes):
            row = rows.get(block)
            if row is not None and masks[row] & in_host:
                first = position if first < 0 else first
            elif first >= 0:
                runs.append((first, position))
                first = -1
        if first >= 0:
            runs.append((first, len(block_hashes)))
        return PeerRuns(tuple(runs))

    def pin(self, names: frozenset[bytes]) -> None:
        """Evict blocks with these names only if all blocks have such names.

        The names replace the names of the last call.
        """
        self._pinned = names

    def take_forgotten(self) -> list[IndexDelta]:
        """The blocks that were evicted since the last call, per instance.

        Copies of this index must drop these blocks, too. Each returned delta has the `sequence` of
        the last delta that was applied for its instance.
        """
        forgotten, self._forgotten = self._forgotten, {}
        return [
            IndexDelta(i, *version, removed=tuple(engine), host=TierDelta(removed=tuple(host)))
            for i, (engine, host) in forgotten.items()
            if (version := self.version(i))
        ]

    def check_invariants(self) -> None:
        union: dict[int, int] = {}
        holders = (*self._instances.values(), *self._gone)
        for holder in holders:
            assert len(holder.waiting) <= MAX_WAITING
            assert all(s > holder.sequence for s in holder.waiting)
            assert holder.is_whole or holder.waiting or holder.sequence == 0
            assert holder.load is not None or holder in self._gone or not any(holder.before)
            for own, old, bit in zip(holder.rows, holder.before, holder.bits, strict=True):
                assert not own & old
                for row in own | old:
                    union[row] = union.get(row, 0) | bit
        assert union == {row: mask for row, mask in enumerate(self._masks) if mask}
        assert {name: row for row, name in enumerate(self._names) if name is not None} == self._rows
        assert sorted(self._rows.values()) == sorted(union)
        assert sorted((*self._free, *union)) == list(range(len(self._names)))
        assert self.num_blocks == sum(h.num_blocks for h in holders)
        assert self.num_blocks <= self.max_blocks
        assert self.num_host_blocks == sum(len(h.rows[1]) + len(h.before[1]) for h in holders)
        assert {i: h.slot for i, h in self._instances.items()} == {
            i: slot for slot, i in enumerate(self._ids) if i not in ("", _GONE)
        }
        assert self._everyone == sum(h.bits[0] for h in self._instances.values())

    def _in_tier(self, mask: int, tier: Tier | None) -> int:
        """The engine bits of the instances that hold the block in `tier`.

        The result may have bits of host pools, too. The caller masks them out with `candidates`.
        """
        if tier is None:
            return mask | mask >> 1
        return mask if tier is Tier.ENGINE else mask >> 1

    def _note(self, matches: dict[str, int], mask: int, length: int) -> None:
        """Record `length` for the instances in `mask`, which has only engine bits.

        Up to `_FEW` bits are read one by one. More bits are read in one pass and cached.
        """
        if mask.bit_count() <= _FEW:
            while mask:
                bit = mask.bit_length() - 1
                matches[self._ids[bit >> 1]] = length
                mask ^= 1 << bit
            return
        ids = self._ids_of.get(mask)
        if ids is None:
            if len(self._ids_of) >= _MAX_REMEMBERED:
                self._ids_of.clear()
            flags = f"{mask:b}"[::-2]
            ids = tuple(name for name, flag in zip(self._ids, flags, strict=False) if flag == "1")
            self._ids_of[mask] = ids
        matches.update(dict.fromkeys(ids, length))

    def _holder_for(self, instance_id: str, incarnation: int) -> _Holder | None:
        """The state of this incarnation, created if it is new. None if the incarnation is over."""
        holder = self._instances.get(instance_id)
        if holder is not None:
            if holder.incarnation == incarnation:
                return holder
            if incarnation in self._retired.get(instance_id, ()):
                return None
            self.retire_instance(instance_id)
        elif incarnation in self._retired.get(instance_id, ()):
            return None
        if "" not in self._ids:
            self._ids.append("")
            self._by_slot.append(None)
        slot = self._ids.index("")
        holder = self._instances[instance_id] = self._by_slot[slot] = _Holder(slot, incarnation)
        self._ids[slot] = instance_id
        self._everyone |= holder.bits[0]
        self._ids_of.clear()
        return holder

    def take_names(self, load: SnapshotLoad, max_blocks: int) -> int:
        """For `SnapshotLoad` only: take the next `max_blocks` names, or all that are left.

        Returns the number of names taken.
        """
        holder, rank = load.holder, load.rank
        names = list(itertools.islice(load.names[rank], max_blocks))
        before, own = holder.before[rank], holder.rows[rank]
        known = list(map(self._rows.get, names))
        if before:
            kept = before.intersection(known)
            before -= kept
            own |= kept
        self._store(holder, rank, names)
        return len(names)

    def drop_unnamed(self, holder: _Holder, max_blocks: int) -> int:
        """For `SnapshotLoad` only: drop blocks that the snapshot did not name, and count them."""
        return self._drop_some(holder, holder.before, max_blocks)

    def end_snapshot(self, load: SnapshotLoad) -> DeltaOutcome:
        """For `SnapshotLoad` only."""
        holder = load.holder
        assert not any(holder.before)
        holder.load, holder.sequence = None, load.sequence
        for waiting in [s for s in holder.waiting if s <= load.sequence]:
            del holder.waiting[waiting]
        return self._drain(holder)

    def _drop_some(self, holder: _Holder, parts: Sequence[set[int]], max_blocks: int) -> int:
        """Drop blocks and return how many. `parts` has rows, of engine and host pool by turns."""
        num_dropped = 0
        for number, rows in enumerate(parts):
            rank = number % len(TIERS)
            while rows and num_dropped < max_blocks:
                self._drop(rows.pop(), holder.bits[rank], rank)
                num_dropped += 1
        return num_dropped

    def _wait(self, holder: _Holder, delta: IndexDelta) -> None:
        holder.is_whole = False
        holder.waiting[delta.sequence] = delta
        if len(holder.waiting) > MAX_WAITING:  # a snapshot will cover the oldest delta
            del holder.waiting[min(holder.waiting)]

    def _drain(self, holder: _Holder) -> DeltaOutcome:
        """Apply the waiting deltas that follow without a gap."""
        while delta := holder.waiting.pop(holder.sequence + 1, None):
            self._change(holder, delta)
        holder.is_whole = not holder.waiting
        return DeltaOutcome.APPLIED if holder.is_whole else DeltaOutcome.GAP

    def _change(self, holder: _Holder, delta: IndexDelta) -> None:
        for rank, part in enumerate((delta, delta.host)):
            if part is not None:
                if part.is_cleared:
                    self._clear(holder, rank)
                self._remove(holder, rank, part.removed)
                self._store(holder, rank, part.stored)
        holder.sequence = delta.sequence

    def _store(self, holder: _Holder, rank: int, blocks: Iterable[bytes]) -> None:
        bit, own = holder.bits[rank], holder.rows[rank]
        for block in blocks:
            row = self._rows.get(block)
            if row in own:
                continue
            if self.num_blocks >= self.max_blocks:
                self._make_room()
                row = self._rows.get(block)  # `_make_room` may have dropped this block
            if row is None:
                row = self._new_row(block)
                self._masks[row] = bit
            else:
                self._masks[row] = self._intern(self._masks[row] | bit)
            own.add(row)
            self.num_blocks += 1
            self.num_host_blocks += rank

    def _remove(self, holder: _Holder, rank: int, blocks: Iterable[bytes]) -> None:
        own = holder.rows[rank]
        for block in blocks:
            row = self._rows.get(block)
            if row is not None and row in own:
                own.remove(row)
                self._drop(row, holder.bits[rank], rank)

    def _clear(self, holder: _Holder, rank: int) -> None:
        own = holder.rows[rank]
        for row in own:
            self._drop(row, holder.bits[rank], rank)
        own.clear()

    def _drop(self, row: int, bit: int, rank: int) -> None:
        """Remove one holder of a row. A row without holders becomes free."""
        self.num_blocks -= 1
        self.num_host_blocks -= rank
        rest = self._masks[row] & ~bit
        if rest:
            self._masks[row] = self._intern(rest)
            return
        self._masks[row] = 0
        del self._rows[self._name(row)]
        self._names[row] = None
        self._free.append(row)

    def _make_room(self) -> None:
        """Make room for one entry, from the blocks of gone instances if any are left."""
        self.sweep(1)
        if self.num_blocks >= self.max_blocks:
            self._evict_one()

    def _evict_one(self) -> None:
        """Evict the next block that no prompt asked for since the hand passed it."""
        row = self._next_victim()
        name, mask = self._name(row), self._masks[row]
        while mask:
            bit = mask.bit_length() - 1
            mask ^= 1 << bit
            slot, rank = divmod(bit, 2)
            holder = self._by_slot[slot]
            assert holder is not None
            holder.forget(rank, row)
            if self._ids[slot] != _GONE:
                self._forgotten.setdefault(self._ids[slot], ([], []))[rank].append(name)
            self.num_evicted += 1
            self._drop(row, holder.bits[rank], rank)

    def _next_victim(self) -> int:
        """Find the row to evict, and move the hand past it, because a new block takes this row.

        A pinned row is evicted only if the hand has passed it twice. The first pass finds all other
        rows used and clears their marks. If the second pass finds none of them, all are pinned.
        """
        first_pinned, num_passes = -1, 0
        while True:
            row, name = self._hand, self._names[self._hand]
            if name is not None and not self._is_used[row]:
                if name not in self._pinned:
                    break
                first_pinned = row if first_pinned < 0 else first_pinned
                num_passes += row == first_pinned
                if num_passes > 2:
                    break
            self._is_used[row] = 0
            self._hand = (row + 1) % len(self._names)
        self._hand = (row + 1) % len(self._names)
        return row

    def _new_row(self, block: bytes) -> int:
        if self._free:
            row = self._free.pop()
        else:
            row = len(self._names)
            self._names.append(None)
            self._masks.append(0)
            self._is_used.append(0)
        self._rows[block] = row
        self._names[row] = block
        self._is_used[row] = 0
        return row

    def _name(self, row: int) -> bytes:
        name = self._names[row]
        assert name is not None
        return name

    def _intern(self, mask: int) -> int:
        if len(self._interned) >= _MAX_INTERNED:
            self._interned.clear()
        return self._interned.setdefault(mask, mask)

    def _retire(self, instance_id: str, incarnation: int) -> None:
        retired = [i for i in self._retired.get(instance_id, ()) if i != incarnation]
        self._retired[instance_id] = [*retired, incarnation][-_MAX_RETIRED:]
