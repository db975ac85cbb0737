"""Decides which entries of a bucket a reader should ask for, to find out whether they have expired.

An entry is due when it was not renewed for a lease. NATS could report each expiry itself, with a
marker. But a stream with markers accepts the header `Nats-Rollup: all` from every writer, so the
writer of one key could wipe all others. (Measured with 2.15.1: for such a stream, the server sets
`allow_rollup_hdrs` and drops `deny_purge`.)
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class LeaseEnds:
    """All times are seconds of the caller's clock.

    The server decides when a lease ends, so an entry that is due may still exist. It is due again
    after `retry_s`, then after twice that time, and so on, but at most after a lease. The waits
    grow because a writer may have made an entry that never expires.
    """

    lease_s: float
    retry_s: float
    # By key: the revision, the time when the entry is due, and the pause until it is due again.
    _entries: dict[str, tuple[int, float, float]] = field(default_factory=dict)

    def renewed(self, key: str, revision: int, now: float) -> None:
        self._entries[key] = (revision, now + self.lease_s, self.retry_s)

    def ended(self, key: str) -> None:
        self._entries.pop(key, None)

    def clear(self) -> None:
        self._entries.clear()

    def due(self, now: float) -> dict[str, int]:
        """The keys to ask for, each with the revision that was last seen."""
        found = {key: revision for key, (revision, at, _) in self._entries.items() if at <= now}
        for key, revision in found.items():
            pause = self._entries[key][2]
            self._entries[key] = (revision, now + pause, min(2 * pause, self.lease_s))
        return found

    def is_last(self, key: str, revision: int) -> bool:
        """Whether no later revision of the key was seen."""
        return key in self._entries and self._entries[key][0] == revision
