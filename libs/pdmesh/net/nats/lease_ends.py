"""Decides which entries of a leased bucket a reader asks for: those not renewed for a lease.

NATS itself could report each end, with a marker. But a stream with markers accepts the header
`Nats-Rollup: all` from every writer, so the writer of one key could wipe all others (measured with
2.15.1: the server sets `allow_rollup_hdrs` and drops `deny_purge` for such a stream).
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class LeaseEnds:
    """Times are those of the caller's clock, in seconds.

    The server decides when a lease ends, so an entry that is due may still be there. It is due
    again after `retry_s`, then after twice that time, and so on, at most after a lease. The waits
    grow because an entry may have been written so that it never ends.
    """

    lease_s: float
    retry_s: float
    # By key: its revision, when it is due, and after how long it is due again.
    _entries: dict[str, tuple[int, float, float]] = field(default_factory=dict)

    def renewed(self, key: str, revision: int, now: float) -> None:
        self._entries[key] = (revision, now + self.lease_s, self.retry_s)

    def ended(self, key: str) -> None:
        self._entries.pop(key, None)

    def clear(self) -> None:
        self._entries.clear()

    def due(self, now: float) -> dict[str, int]:
        """Keys to ask for, with the revision that was last seen of each."""
        found = {key: revision for key, (revision, at, _) in self._entries.items() if at <= now}
        for key, revision in found.items():
            pause = self._entries[key][2]
            self._entries[key] = (revision, now + pause, min(2 * pause, self.lease_s))
        return found

    def is_last(self, key: str, revision: int) -> bool:
        """Whether this is the last revision that was seen of the key."""
        return key in self._entries and self._entries[key][0] == revision
