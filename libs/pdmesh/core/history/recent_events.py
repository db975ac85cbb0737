"""The latest events: changes by operators, changes of groups, upgrades, changes of leader, errors.

An event that repeats within a minute is counted, but not listed again. Each kind of event has its
own bound. So a flood of errors does not push out the change that caused it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

MAX_OF_A_KIND: Final = 100
_AGAIN_WITHIN_S: Final = 60.0
_LOOK_BACK: Final = 8  # a repeated event is looked for among this many latest events of its kind
KINDS: Final = ("change", "group", "upgrade", "leader", "error")


@dataclass(slots=True)
class ToldEvent:
    """`at` is when the event last occurred, in seconds since 1970. `count` is how often it
    occurred.
    """

    at: float
    kind: str
    about: str
    what: str
    count: int = 1


def _empty() -> dict[str, deque[ToldEvent]]:
    return {kind: deque(maxlen=MAX_OF_A_KIND) for kind in KINDS}


@dataclass(slots=True)
class RecentEvents:
    _kinds: dict[str, deque[ToldEvent]] = field(default_factory=_empty)

    def add(self, kind: str, about: str, what: str, at: float) -> None:
        """`kind` is one of KINDS."""
        known = self._kinds[kind]
        for event in list(known)[-_LOOK_BACK:]:
            if (event.about, event.what) == (about, what) and at - event.at < _AGAIN_WITHIN_S:
                event.at, event.count = at, event.count + 1
                return
        known.append(ToldEvent(at, kind, about, what))

    def latest(self) -> list[ToldEvent]:
        """All events by time, the latest one last."""
        every = [event for known in self._kinds.values() for event in known]
        return sorted(every, key=lambda event: event.at)
