"""Decides whether this process leads, from its own lease alone.

A leader that could not renew for two thirds of the lease stops leading by itself, before another
process can start to lead. So no two processes lead at once, whatever the network does and however
long this process is paused.

Epochs only grow, and what an older epoch decided is refused (I7). A process that has seen an epoch
says so in its record, and a leader's epoch stays above all epochs seen. A store that was wiped
forgets which process leads, and the leader learns that only at its next renewal. So a standby that
knew of the lease waits until the lease is over.
"""

from __future__ import annotations

from dataclasses import dataclass

FENCE_SHARE = 2 / 3
FORGET_EPOCH_S = 10.0  # longer than any lease: an earlier leader has stopped by then


@dataclass(slots=True)
class Leadership:
    lease_s: float
    epoch: int = 0  # of our own leadership, or the highest seen
    _is_leader: bool = False
    _renewed_at: float = 0.0
    _other_until: float = 0.0

    def is_leader(self, now: float) -> bool:
        return self._is_leader and now - self._renewed_at < self.lease_s * FENCE_SHARE

    def won(self, revision: int, asked_at: float) -> int:
        """The lease is ours.

        The new epoch is above all epochs seen, even if the store was wiped and counts from 1.
        """
        self.epoch = max(revision, self.epoch + 1)
        self._is_leader, self._renewed_at = True, asked_at
        return self.epoch

    def renewed(self, asked_at: float) -> None:
        """Count from the moment we asked for the renewal: the store's clock started no earlier."""
        self._renewed_at = max(self._renewed_at, asked_at)

    def lost(self) -> None:
        self._is_leader = False

    def other_holds(self, now: float) -> None:
        """The store says that another process holds the lease."""
        self._other_until = now + self.lease_s

    def vacated(self) -> None:
        """The store says that the lease was given up, or ended."""
        self._other_until = 0.0

    def may_win(self, now: float) -> bool:
        """Whether the lease may be taken if the store knows of none.

        It may not while a lease that the store has forgotten may be valid (F21).
        """
        return now >= self._other_until

    def tick(self, now: float) -> bool:
        """True once, when the lease is over because it was not renewed in time."""
        if self._is_leader and not self.is_leader(now):
            self._is_leader = False
            return True
        return False

    def saw(self, epoch: int, now: float) -> bool:
        """Another process knows of this epoch. True if we still lead, now with a higher epoch.

        No other process leads while the lease is valid. So a higher epoch comes from a store that
        was wiped since (F21), and a process that has seen it would ignore a leader with a lower
        epoch.
        """
        if epoch <= self.epoch:
            return False
        is_leader = self.is_leader(now)
        self.epoch = epoch + 1 if is_leader else epoch
        return is_leader


@dataclass(slots=True)
class EpochFence:
    """Decides which leader's answers count: those with the highest epoch heard (I7).

    A store that was wiped while the masters restarted counts from one again (F21). So an epoch that
    was not heard for longer than any lease is over, and a lower epoch counts.
    """

    epoch: int = 0
    _heard_at: float = 0.0

    def admit(self, epoch: int, now: float) -> bool:
        if epoch < self.epoch and now - self._heard_at < FORGET_EPOCH_S:
            return False
        self.epoch, self._heard_at = epoch, now
        return True
