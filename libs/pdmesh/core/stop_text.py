"""Finds stop strings in text that arrives in pieces.

The tail that may be the beginning of a stop string is held back until it is known. Where the pieces are cut
never changes the result: the stop that is complete first wins, and the text before it is kept.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopText:
    __slots__ = ("_held", "_max_held", "_stops", "is_stopped")

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string matches everywhere"
        self._stops = tuple(stops)
        self._max_held = max((len(s) for s in self._stops), default=1) - 1
        self._held = ""
        self.is_stopped = False

    def feed(self, piece: str) -> str:
        """The text that may be shown now. Nothing more comes once `is_stopped`."""
        if self.is_stopped:
            return ""
        text = self._held + piece
        start = self._first_match(text)
        if start is not None:
            self.is_stopped, self._held = True, ""
            return text[:start]
        num_held = self._num_held(text)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def flush(self) -> str:
        """The held tail, once nothing can complete it."""
        tail, self._held = self._held, ""
        return tail

    def _first_match(self, text: str) -> int | None:
        ends = [(at + len(s), at) for s in self._stops if (at := text.find(s)) >= 0]
        return min(ends)[1] if ends else None

    def _num_held(self, text: str) -> int:
        for num in range(min(self._max_held, len(text)), 0, -1):
            tail = text[-num:]
            if any(s.startswith(tail) for s in self._stops):
                return num
        return 0
