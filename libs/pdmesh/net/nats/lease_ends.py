"""Which entries of a leased bucket nobody has renewed for a lease, so that a reader asks for them.

NATS would tell of each end itself, with a marker. But a stream with markers takes the header
`Nats-Rollup: all` from every writer, and so lets the writer of one key wipe all others (measured
with 2.15.1: the server sets `allow_rollup_hdrs` and drops `deny_purge` for such a stream).
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class LeaseEnds:
    """Times are those of the caller's clock, in seconds.

    The server decides when a lease ends. So an entry that is due may still be there, and is due
    again a little later, and then after twice that time, up to a lease: an entry may also have been
    written so that it never ends.
    """

    lease_s: float
    retry_s: float
    # By key: revision, when it is due, and how much later again.
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
        """Whether nothing has come of the key since this revision."""
        return key in self._entries and self._entries[key][0] == revision
