"""Decides which KV files of a shared directory are evicted, and how many bytes may stay (S105).

An owner is a tenant under one salt, a value from the client that keeps caches apart. Files of
owners with more than their share of the quota are evicted first, then other files. In both cases,
the least recently used file comes first. A file whose time of last use is in the future is kept
until that time. But kept files must leave a quarter of the quota to the others. If the disk is full
although the quota is not reached, files are evicted once, and again only after a block has been
written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

LOW_WATER: Final = 0.9  # eviction ends at this share of the quota
KEPT_SHARE: Final = 0.75  # the share of the quota for files that are kept until a time
KEEP_FILES_S: Final = 24 * 3600.0  # how long to keep the file of a block that many requests use
_AGE_STEP_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A block's file. `used_at` is wall-clock time in seconds, because machines share them."""

    path: Path
    num_bytes: int
    used_at: float

    @property
    def owner(self) -> str:
        return self.path.parent.parent.name

    @property
    def name(self) -> bytes:
        return bytes.fromhex(self.path.stem)


def first_use(now: float, position: int) -> float:
    """The time of last use to record for a new file, whose block is at `position` of its prompt.

    A block counts as a little older than the block before it, so that the end of a prompt is
    evicted before its beginning.
    """
    return now - position * _AGE_STEP_S


def room_for(size: int, quota: int) -> int:
    """How many bytes of files may stay when a file of `size` bytes needs room in the quota."""
    return int(LOW_WATER * quota) - size


def room_on_full_disk(size: int, used: int) -> int:
    """How many bytes of files may stay when the disk is full before the quota is reached."""
    return min(int(LOW_WATER * used), used - size)


@dataclass(slots=True)
class FullDisk:
    """Whether files are evicted because the disk is full, even if the quota is not reached.

    After one such eviction, nothing is evicted until a block has been written. Otherwise, if other
    programs took the freed bytes each time, the whole store would be evicted without any use.
    """

    _has_evicted: bool = False

    def may_evict(self) -> bool:
        """Whether to evict files and try once more, after a block did not fit on the disk."""
        may, self._has_evicted = not self._has_evicted, True
        return may

    def written(self) -> None:
        """Record that a block was written."""
        self._has_evicted = False


def eviction_order(
    files: Iterable[StoredFile], now: float, quota: int, owner_share: float
) -> Iterator[StoredFile]:
    """The files that may be evicted, in order. `owner_share` is a share of the quota, 0 to 1."""
    by_use = sorted(files, key=lambda f: (f.used_at, f.path))
    of_owner: dict[str, int] = {}
    for stored in by_use:
        of_owner[stored.owner] = of_owner.get(stored.owner, 0) + stored.num_bytes
    share = owner_share * quota
    later: list[StoredFile] = []
    kept = [stored for stored in by_use if stored.used_at > now]
    for stored in by_use[: len(by_use) - len(kept)]:
        if of_owner[stored.owner] > share:
            of_owner[stored.owner] -= stored.num_bytes
            yield stored
        else:
            later.append(stored)
    yield from later
    yield from _kept_too_many(kept, quota)


def _kept_too_many(kept: Sequence[StoredFile], quota: int) -> Iterator[StoredFile]:
    """The kept files beyond `KEPT_SHARE`, the file with the latest time first.

    The latest time may come from a wrong clock, or from a pin that has been removed since.
    """
    num_bytes = sum(stored.num_bytes for stored in kept)
    for stored in reversed(kept):
        if num_bytes <= KEPT_SHARE * quota:
            return
        num_bytes -= stored.num_bytes
        yield stored
