"""Sources whose KV was corrupt too often are not pulled from for a while (F34).

A source that corrupts `limit` times within `window_s` is held for `hold_s`; then it starts with a clean record. One corrupt pull
is recomputed and forgotten, since memory and links fail once in a while; a source that keeps corrupting costs
every request a recomputation.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field

MAX_SOURCES = 1024


@dataclass(slots=True)
class Quarantine:
    """By instance id. At most MAX_SOURCES are remembered; the least recently corrupt is forgotten first."""

    limit: int = 3
    window_s: float = 60.0
    hold_s: float = 60.0
    _strikes: OrderedDict[str, deque[float]] = field(default_factory=OrderedDict)
    _held_until: dict[str, float] = field(default_factory=dict)

    def __len__(self) -> int:
        """Sources held now."""
        return len(self._held_until)

    def record(self, source: str, now: float) -> bool:
        """A pull from `source` was corrupt. True if that puts it into quarantine."""
        if source in self._held_until:
            return False  # a pull that was under way
        strikes = self._strikes.setdefault(source, deque(maxlen=self.limit))
        self._strikes.move_to_end(source)
        strikes.append(now)
        while strikes[0] <= now - self.window_s:
            strikes.popleft()
        if len(self._strikes) > MAX_SOURCES:
            self._strikes.popitem(last=False)
        if len(strikes) < self.limit or len(self._held_until) >= MAX_SOURCES:
            return False
        del self._strikes[source]
        self._held_until[source] = now + self.hold_s
        return True

    def is_held(self, source: str, now: float) -> bool:
        until = self._held_until.get(source)
        return until is not None and now < until

    def release_due(self, now: float) -> list[str]:
        """Sources whose time is over, each told once."""
        due = [source for source, until in self._held_until.items() if now >= until]
        for source in due:
            del self._held_until[source]
        return due

    def check_invariants(self) -> None:
        assert len(self._strikes) <= MAX_SOURCES
        assert len(self._held_until) <= MAX_SOURCES
        assert not self._strikes.keys() & self._held_until.keys()
        assert all(0 < len(strikes) < self.limit for strikes in self._strikes.values())
