"""Which instance holds which KV block, and how much of a prompt each one has (S98, S99, S102).

One map, block hash -> bitmask of holders, kept by numbered deltas. Deltas of one incarnation apply in order; later ones wait
(bounded) until the hole fills or a snapshot covers it. A match counts contiguous blocks from the start only:
a block whose predecessor an instance lacks is of no use to it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

MAX_WAITING = 256  # deltas kept beyond a hole, per instance
_MAX_RETIRED = 4  # incarnations remembered as over, per instance


class Outcome(enum.Enum):
    APPLIED = "applied"
    STALE = "stale"  # repeated, late, or of an incarnation that is over
    GAP = "gap"  # deltas before it are missing: load a snapshot


@dataclass(frozen=True, slots=True)
class Delta:
    """What changed in one instance's cache. `is_cleared` applies first, then `removed`, then `stored`."""

    instance_id: str
    incarnation: int
    sequence: int  # from 1
    removed: Sequence[bytes] = ()
    stored: Sequence[bytes] = ()
    is_cleared: bool = False


@dataclass(slots=True)
class _Holder:
    bit: int
    incarnation: int
    sequence: int = 0
    blocks: set[bytes] = field(default_factory=set)
    waiting: dict[int, Delta] = field(default_factory=dict)
    is_whole: bool = True  # no delta is known to be missing


@dataclass(slots=True)
class PrefixIndex:
    """Bounded by `max_blocks` entries over all instances; beyond it, stored blocks are left out and counted."""

    max_blocks: int = 8_000_000
    num_blocks: int = 0  # sum over instances
    num_left_out: int = 0
    _holders: dict[bytes, int] = field(default_factory=dict)
    _instances: dict[str, _Holder] = field(default_factory=dict)
    _ids_by_bit: dict[int, str] = field(default_factory=dict)
    _retired: dict[str, list[int]] = field(default_factory=dict)

    def instance_ids(self) -> list[str]:
        return sorted(self._instances)

    def version(self, instance_id: str) -> tuple[int, int] | None:
        """(incarnation, sequence) up to which the instance is known."""
        holder = self._instances.get(instance_id)
        return (holder.incarnation, holder.sequence) if holder else None

    def is_whole(self, instance_id: str) -> bool:
        """False while deltas of the instance are missing."""
        holder = self._instances.get(instance_id)
        return holder is not None and holder.is_whole

    def blocks(self, instance_id: str) -> frozenset[bytes]:
        holder = self._instances.get(instance_id)
        return frozenset(holder.blocks) if holder else frozenset()

    def num_blocks_of(self, instance_id: str) -> int:
        holder = self._instances.get(instance_id)
        return len(holder.blocks) if holder else 0

    def apply(self, delta: Delta) -> Outcome:
        """After GAP the delta waits; the ones that fill the hole, or a snapshot, bring it in."""
        holder = self._holder_for(delta.instance_id, delta.incarnation)
        if holder is None or delta.sequence <= holder.sequence:
            return Outcome.STALE
        if delta.sequence > holder.sequence + 1:
            self._wait(holder, delta)
            return Outcome.GAP
        self._change(holder, delta)
        return self._drain(holder)

    def load_snapshot(
        self, instance_id: str, incarnation: int, sequence: int, blocks: Iterable[bytes]
    ) -> Outcome:
        """Replace what is known of the instance by all it held after delta `sequence`.

        GAP: deltas after the snapshot are missing still.
        """
        holder = self._holder_for(instance_id, incarnation)
        if holder is None or sequence < holder.sequence:
            return Outcome.STALE
        held = set(blocks)
        self._remove(holder, holder.blocks - held)
        self._store(holder, held)
        holder.sequence = sequence
        for waiting in [s for s in holder.waiting if s <= sequence]:
            del holder.waiting[waiting]
        return self._drain(holder)

    def remove_instance(self, instance_id: str) -> int:
        """Forget an instance that is gone, and its incarnation for good. Returns the number of its blocks, which is the cost."""
        holder = self._instances.pop(instance_id, None)
        if holder is None:
            return 0
        num_blocks = len(holder.blocks)
        self._remove(holder, tuple(holder.blocks))
        del self._ids_by_bit[holder.bit]
        self._retire(instance_id, holder.incarnation)
        return num_blocks

    def forget_history(self, instance_id: str) -> None:
        """Let an incarnation that was removed come back: its lease had ended, but it lives."""
        self._retired.pop(instance_id, None)

    def match(self, block_hashes: Sequence[bytes]) -> dict[str, int]:
        """Contiguous blocks from the start, per instance that holds at least the first. One pass, early exit."""
        matches: dict[str, int] = {}
        candidates = -1
        for position, block in enumerate(block_hashes):
            still = candidates & self._holders.get(block, 0)
            if still != candidates and position:
                self._note(matches, candidates & ~still, position)
            candidates = still
            if not candidates:
                return matches
        if block_hashes:
            self._note(matches, candidates, len(block_hashes))
        return matches

    def check_invariants(self) -> None:
        union: dict[bytes, int] = {}
        for holder in self._instances.values():
            assert len(holder.waiting) <= MAX_WAITING
            assert all(s > holder.sequence for s in holder.waiting)
            assert holder.is_whole or holder.waiting or holder.sequence == 0
            for block in holder.blocks:
                union[block] = union.get(block, 0) | 1 << holder.bit
        assert union == self._holders
        assert self.num_blocks == sum(len(h.blocks) for h in self._instances.values())
        assert self.num_blocks <= self.max_blocks
        assert self._ids_by_bit == {h.bit: i for i, h in self._instances.items()}

    def _note(self, matches: dict[str, int], mask: int, length: int) -> None:
        while mask:
            lowest = mask & -mask
            matches[self._ids_by_bit[lowest.bit_length() - 1]] = length
            mask ^= lowest

    def _holder_for(self, instance_id: str, incarnation: int) -> _Holder | None:
        """The instance's state under this incarnation, made if new; None if the incarnation is over."""
        holder = self._instances.get(instance_id)
        if holder is not None:
            if holder.incarnation == incarnation:
                return holder
            if incarnation in self._retired.get(instance_id, ()):
                return None
            self.remove_instance(instance_id)
        elif incarnation in self._retired.get(instance_id, ()):
            return None
        bit = next(b for b in range(len(self._ids_by_bit) + 1) if b not in self._ids_by_bit)
        holder = self._instances[instance_id] = _Holder(bit, incarnation)
        self._ids_by_bit[bit] = instance_id
        return holder

    def _wait(self, holder: _Holder, delta: Delta) -> None:
        holder.is_whole = False
        holder.waiting[delta.sequence] = delta
        if len(holder.waiting) > MAX_WAITING:  # the snapshot will cover the oldest
            del holder.waiting[min(holder.waiting)]

    def _drain(self, holder: _Holder) -> Outcome:
        """Apply what waited for the delta or snapshot that just came in."""
        while delta := holder.waiting.pop(holder.sequence + 1, None):
            self._change(holder, delta)
        holder.is_whole = not holder.waiting
        return Outcome.APPLIED if holder.is_whole else Outcome.GAP

    def _change(self, holder: _Holder, delta: Delta) -> None:
        if delta.is_cleared:
            self._remove(holder, tuple(holder.blocks))
        self._remove(holder, delta.removed)
        self._store(holder, delta.stored)
        holder.sequence = delta.sequence

    def _store(self, holder: _Holder, blocks: Iterable[bytes]) -> None:
        mask = 1 << holder.bit
        holders, own = self._holders, holder.blocks
        for block in blocks:
            if block in own:
                continue
            if self.num_blocks >= self.max_blocks:
                self.num_left_out += 1
                continue
            own.add(block)
            holders[block] = holders.get(block, 0) | mask
            self.num_blocks += 1

    def _remove(self, holder: _Holder, blocks: Iterable[bytes]) -> None:
        mask = 1 << holder.bit
        holders, own = self._holders, holder.blocks
        for block in blocks:
            if block not in own:
                continue
            own.remove(block)
            self.num_blocks -= 1
            if rest := holders[block] & ~mask:
                holders[block] = rest
            else:
                del holders[block]

    def _retire(self, instance_id: str, incarnation: int) -> None:
        retired = [i for i in self._retired.get(instance_id, ()) if i != incarnation]
        self._retired[instance_id] = [*retired, incarnation][-_MAX_RETIRED:]
