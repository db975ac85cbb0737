"""Decides whose snapshot is requested next, and whether from the instance or from an index.

A snapshot is the list of all KV blocks that an instance holds. A process that follows the changes
of these blocks needs the instance's snapshot when a change is missing. Only a few requests are open
at a time, and the instance that has been due longest comes first. After a failed request, the
instance is due again after a pause, which doubles up to a bound. So an instance that does not
answer hardly delays the other requests.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

_ANSWER_HELPS_WITHIN_S: Final = 2.0


@dataclass(slots=True)
class IndexFirst:
    """Chooses the kv-cache-index service as the first source, to spare the instance the work.

    If the same snapshot is wanted again soon, the index's answer did not help. The instance itself
    is then asked.
    """

    _asked_at: dict[str, float] = field(default_factory=dict)

    def asks_index(self, instance_id: str, now: float) -> bool:
        """Whether to ask the index, and record that it is asked. `now` is in monotonic seconds."""
        recent = {i: at for i, at in self._asked_at.items() if now - at < _ANSWER_HELPS_WITHIN_S}
        self._asked_at = recent
        if instance_id in recent:
            return False
        recent[instance_id] = now
        return True


@dataclass(slots=True)
class _Wanted:
    since: float
    due: float
    pause_s: float
    is_in_flight: bool = False
    is_again: bool = False  # wanted again during the request, whose answer may then be too old


@dataclass(slots=True)
class Repairs:
    """Tracks whose snapshots are still needed. All times are seconds of one monotonic clock.

    `settle_s` is the wait before a snapshot is requested. In this time the missing change may still
    arrive.
    """

    max_in_flight: int = 4
    settle_s: float = 0.05
    first_pause_s: float = 0.2
    max_pause_s: float = 2.0
    _wanted: dict[str, _Wanted] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._wanted)

    def want(self, instance_id: str, now: float) -> None:
        wanted = self._wanted.get(instance_id)
        if wanted is None:
            self._wanted[instance_id] = _Wanted(now, now + self.settle_s, self.first_pause_s)
        elif wanted.is_in_flight:
            wanted.is_again = True

    def start(self, now: float) -> list[str]:
        """The instances to ask now. The caller must call `ended` later for each."""
        due = sorted(
            (w.due, i) for i, w in self._wanted.items() if not w.is_in_flight and w.due <= now
        )
        started = [i for _, i in due[: max(0, self.max_in_flight - self._num_in_flight())]]
        for instance_id in started:
            self._wanted[instance_id].is_in_flight = True
            self._wanted[instance_id].is_again = False
        return started

    def ended(self, instance_id: str, is_done: bool, now: float) -> None:
        wanted = self._wanted[instance_id]
        assert wanted.is_in_flight
        if is_done and not wanted.is_again:
            del self._wanted[instance_id]
            return
        wanted.is_in_flight = False
        wanted.due = now + (self.settle_s if is_done else wanted.pause_s)
        if not is_done:
            wanted.pause_s = min(2 * wanted.pause_s, self.max_pause_s)

    def next_start(self) -> float | None:
        """When to call `start` next. If None, a call of `want` or `ended` must come first."""
        if self._num_in_flight() >= self.max_in_flight:
            return None
        return min((w.due for w in self._wanted.values() if not w.is_in_flight), default=None)

    def since(self) -> Iterable[tuple[str, float]]:
        """The instances whose snapshots are still needed, and since when."""
        return [(i, w.since) for i, w in self._wanted.items()]

    def check_invariants(self) -> None:
        assert self._num_in_flight() <= self.max_in_flight
        assert all(w.pause_s <= self.max_pause_s for w in self._wanted.values())

    def _num_in_flight(self) -> int:
        return sum(w.is_in_flight for w in self._wanted.values())
