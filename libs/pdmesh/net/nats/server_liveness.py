"""Decides whether the NATS server answers, by echoes of this process's own messages.

An open socket does not show that the server answers. So the bus sends itself a message every
`ECHO_EVERY_S`, and the server counts as away after `OUTAGE_S` without an echo. `NatsBus` sends,
hears and acts; nothing here reads a clock.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final

ECHO_EVERY_S: Final = 0.5
OUTAGE_S: Final = 1.5  # without an echo for this time, the server counts as away


class ServerNews(Enum):
    LOST = auto()
    RESTORED = auto()
    STILL_LOST = auto()  # also at the last look, so not only this process's loop was late


class ServerLiveness:
    """Times are monotonic seconds. The server counts as away until the first `begin`."""

    def __init__(self) -> None:
        self._is_up = False
        self._last_echo = 0.0
        self._stable_since = 0.0

    @property
    def stable_since(self) -> float:
        """Since when the server answered without a break; valid while it answers."""
        return self._stable_since

    def answers(self, now: float) -> bool:
        return self._is_up and now - self._last_echo < OUTAGE_S

    def begin(self, now: float) -> None:
        """The connection was just made."""
        self._is_up = True
        self._last_echo = self._stable_since = now

    def end(self) -> None:
        """The process closes the connection itself, which is no loss."""
        self._is_up = False

    def echo(self, now: float) -> list[ServerNews]:
        """An echo came, or the connection was made again."""
        is_break = not self.answers(now)
        self._last_echo = now
        if not is_break:
            return []
        news = [*self.disconnected(), ServerNews.RESTORED]
        self._is_up = True
        self._stable_since = now
        return news

    def look(self, now: float) -> list[ServerNews]:
        """Time has passed: `ECHO_EVERY_S` since the last look."""
        if now - self._last_echo < OUTAGE_S:
            return []
        return self.disconnected() or [ServerNews.STILL_LOST]

    def disconnected(self) -> list[ServerNews]:
        """The connection ended, or nothing was heard for too long."""
        was_up, self._is_up = self._is_up, False
        return [ServerNews.LOST] if was_up else []
