"""Decides whether the NATS server answers, by echoes of this process's own messages.

An open socket does not show that the server answers. So `NatsBus` sends itself a message every
`ECHO_EVERY_S`. The server counts as lost after `OUTAGE_S` without such an echo.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final

ECHO_EVERY_S: Final = 0.5
OUTAGE_S: Final = 1.5  # without an echo for this time, the server counts as lost


class ServerNews(Enum):
    LOST = auto()
    RESTORED = auto()
    STILL_LOST = auto()  # lost at two checks in a row, so a late event loop is not the cause


class ServerLiveness:
    """Times are monotonic seconds. The server counts as lost until the first `begin`."""

    def __init__(self) -> None:
        self._is_up = False
        self._last_echo = 0.0
        self._stable_since = 0.0

    @property
    def stable_since(self) -> float:
        """The time since which the server has always answered. Valid while it answers."""
        return self._stable_since

    def answers(self, now: float) -> bool:
        return self._is_up and now - self._last_echo < OUTAGE_S

    def begin(self, now: float) -> None:
        """Note that the connection was made."""
        self._is_up = True
        self._last_echo = self._stable_since = now

    def end(self) -> None:
        """Note that this process closes the connection itself. This is no loss."""
        self._is_up = False

    def echo(self, now: float) -> list[ServerNews]:
        """Note an echo, or that the connection was made again."""
        is_break = not self.answers(now)
        self._last_echo = now
        if not is_break:
            return []
        news = [*self.disconnected(), ServerNews.RESTORED]
        self._is_up = True
        self._stable_since = now
        return news

    def look(self, now: float) -> list[ServerNews]:
        """Check for missing echoes. Call this every `ECHO_EVERY_S`."""
        if now - self._last_echo < OUTAGE_S:
            return []
        return self.disconnected() or [ServerNews.STILL_LOST]

    def disconnected(self) -> list[ServerNews]:
        """Note that the connection ended, or that no echo has arrived for too long."""
        was_up, self._is_up = self._is_up, False
        return [ServerNews.LOST] if was_up else []
