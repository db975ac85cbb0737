"""Decides whether this process leads its service's replicas, from its own lease alone.

Replicas compete for a lease in a store. The leader renews the lease. If it could not renew for two
thirds of the lease, it stops leading by itself, before another process can start to lead. So no two
processes lead at once, whatever the network does and however long this process is paused.

Each leadership has a number, its epoch. Epochs only grow, and orders from an older epoch are
refused (I7). Each process writes the highest epoch that it has seen into its record, and a leader
keeps its epoch above all of these.

A store that was wiped forgets which process leads. The leader notices this only at its next
renewal. So a standby that knows of the lease waits until the lease is over.
"""

from __future__ import annotations

from dataclasses import dataclass

FENCE_SHARE = 2 / 3
FORGET_EPOCH_S = 10.0  # longer than any lease, so an earlier leader has stopped after this time


@dataclass(slots=True)
class Leadership:
    lease_s: float
    epoch: int = 0  # the epoch of our own leadership, or the highest one seen
    _is_leader: bool = False
    _renewed_at: float = 0.0
    _other_until: float = 0.0

    def is_leader(self, now: float) -> bool:
        return self._is_leader and now - self._renewed_at < self.lease_s * FENCE_SHARE

    def won(self, revision: int, asked_at: float) -> int:
        """This process got the lease. Return the epoch of its leadership.

        The new epoch is above all epochs seen, even if the store was wiped and counts from 1 again.
        """
        self.epoch = max(revision, self.epoch + 1)
        self._is_leader, self._renewed_at = True, asked_at
        return self.epoch

    def renewed(self, asked_at: float) -> None:
        """The store has renewed the lease.

        The lease is counted from `asked_at`, when we asked for the renewal. The store's clock
        cannot have started earlier.
        """
        self._renewed_at = max(self._renewed_at, asked_at)

    def lost(self) -> None:
        self._is_leader = False

    def other_holds(self, now: float) -> None:
        """The store says that another process holds the lease."""
        self._other_until = now + self.lease_s

    def vacated(self) -> None:
        """The store says that the holder gave the lease up, or that the lease ended."""
        self._other_until = 0.0

    def may_win(self, now: float) -> bool:
        """Whether this process may take the lease if the store has none.

        A wiped store may have forgotten a lease that is still valid. Until that lease is over, this
        process must not take it (F21).
        """
        return now >= self._other_until

    def tick(self, now: float) -> bool:
        """Return True once, when this process loses the lease because it did not renew in time."""
        if self._is_leader and not self.is_leader(now):
            self._is_leader = False
            return True
        return False

    def saw(self, epoch: int, now: float) -> bool:
        """Another process has seen this epoch. Return True if we still lead, now with a higher
        epoch.

        No other process leads while our lease is valid. So an epoch above ours is from before the
        store was wiped (F21). A process that has seen that epoch would ignore a leader with a lower
        one.
        """
        if epoch <= self.epoch:
            return False
        is_leader = self.is_leader(now)
        self.epoch = epoch + 1 if is_leader else epoch
        return is_leader


@dataclass(slots=True)
class EpochFence:
    """Decides which leader's answers to accept: those with the highest epoch heard (I7).

    A store that was wiped while the masters restarted counts from one again (F21). So if the
    highest epoch was not heard for longer than any lease, the leader with that epoch is gone, and a
    lower epoch is accepted.
    """

    epoch: int = 0
    _heard_at: float = 0.0

    def admit(self, epoch: int, now: float) -> bool:
        if epoch < self.epoch and now - self._heard_at < FORGET_EPOCH_S:
            return False
        self.epoch, self._heard_at = epoch, now
        return True
