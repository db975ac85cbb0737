"""Decides whether a disk may be written and read (F33).

A disk that is full, read-only, broken or hanging is not used, but tried again later. After a failed
write, writing is off: one write per interval is allowed as a probe, until a probe succeeds. After
several failed reads in a row, reading is off in the same way. The intervals double up to a bound.
A read that makes no progress for `hang_s` turns off reading at once, and such a write turns off
writing. While it hangs, no probe is allowed, because the probe would hang as well.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class DiskState(StrEnum):
    OK = "ok"
    READ_ONLY = "read_only"
    OFF = "off"


@dataclass(slots=True)
class _Gate:
    """Lets reads or writes pass. After `limit` failures in a row, one try per interval passes."""

    limit: int
    first_s: float
    most_s: float
    num_failures: int = 0
    wait_s: float = 0.0
    next_try: float = 0.0
    is_hanging: bool = False

    @property
    def is_closed(self) -> bool:
        return self.is_hanging or self.num_failures >= self.limit

    def may_pass(self, now: float) -> bool:
        if not self.is_closed:
            return True
        if self.is_hanging or now < self.next_try:
            return False
        self.next_try = now + self.wait_s  # this try is the probe, and others wait for its outcome
        return True

    def failed(self, now: float) -> None:
        self.num_failures += 1
        if self.is_closed:
            self.wait_s = min(self.most_s, 2 * self.wait_s or self.first_s)
            self.next_try = now + self.wait_s

    def worked(self) -> None:
        self.num_failures, self.wait_s = 0, 0.0

    def hangs(self, is_so: bool, now: float) -> None:
        if is_so and not self.is_hanging:
            self.num_failures = self.limit  # closed until a try succeeds
            self.wait_s, self.next_try = self.first_s, now
        self.is_hanging = is_so


@dataclass(slots=True)
class DiskHealth:
    first_s: float = 1.0
    most_s: float = 30.0
    max_read_failures: int = 3
    hang_s: float = 1.0
    _writes: _Gate = field(init=False)
    _reads: _Gate = field(init=False)

    def __post_init__(self) -> None:
        self._writes = _Gate(1, self.first_s, self.most_s)
        self._reads = _Gate(self.max_read_failures, self.first_s, self.most_s)

    @property
    def state(self) -> DiskState:
        if self._reads.is_closed:
            return DiskState.OFF
        return DiskState.READ_ONLY if self._writes.is_closed else DiskState.OK

    def may_write(self, now: float) -> bool:
        return self._writes.may_pass(now)

    def may_read(self, now: float) -> bool:
        return self._reads.may_pass(now)

    def watch(self, reading_since: float | None, writing_since: float | None, now: float) -> bool:
        """Report when the slowest running read, and the slowest running write, last made progress.

        None means that no read or no write is running. Call this often. Returns whether the state
        changed.
        """
        before = self.state
        for gate, since in ((self._reads, reading_since), (self._writes, writing_since)):
            gate.hangs(since is not None and now - since >= self.hang_s, now)
        return self.state is not before

    @property
    def is_read_hanging(self) -> bool:
        return self._reads.is_hanging

    @property
    def is_write_hanging(self) -> bool:
        return self._writes.is_hanging

    def wrote(self, is_ok: bool, now: float) -> bool:
        """Record the end of a write. Returns whether the state changed."""
        before = self.state
        if is_ok:
            self._writes.worked()
        else:
            self._writes.failed(now)
        return self.state is not before

    def read(self, is_ok: bool, now: float) -> bool:
        before = self.state
        if is_ok:
            self._reads.worked()
        else:
            self._reads.failed(now)
        return self.state is not before
