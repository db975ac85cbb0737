"""Finds stop strings in text that arrives in pieces.

If the end of the text may be the beginning of a stop string, this end is held back until more text
shows whether it is. The first complete stop string ends the text. The result does not depend on how
the text is divided into pieces.

For each stop string, the time grows linearly with the text, even if the strings are repetitive (the
algorithm of Knuth, Morris and Pratt).
"""

from __future__ import annotations

from collections.abc import Sequence


class _Matcher:
    """Tracks how many characters of `stop` are at the end of the text."""

    __slots__ = ("_borders", "_stop", "num_matched")

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._borders = _borders(stop)
        self.num_matched = 0

    def feed(self, piece: str) -> int | None:
        """The index in `piece` just after the complete stop string. None if there is none."""
        stop, borders, num = self._stop, self._borders, self.num_matched
        at, size = 0, len(piece)
        while at < size:
            if not num:  # the usual case, in which Python's own search is much faster
                at = piece.find(stop[0], at)
                if at < 0:
                    break
            while num and piece[at] != stop[num]:
                num = borders[num - 1]
            at += 1
            if piece[at - 1] == stop[num]:
                num += 1
                if num == len(stop):
                    self.num_matched = borders[-1]
                    return at
        self.num_matched = num
        return None

    def pass_over(self, piece: str) -> None:
        """Like `feed`, but a complete stop string does not end the text."""
        while (end := self.feed(piece)) is not None:
            piece = piece[end:]


class StopText:
    """A text that ends at a stop string. With `is_shown`, the text includes the stop string."""

    __slots__ = ("_held", "_is_shown", "_matchers", "_stops", "is_stopped", "stopped_by")

    def __init__(self, stops: Sequence[str], *, is_shown: bool = False) -> None:
        assert all(stops), "an empty stop string matches everywhere"
        self._is_shown = is_shown
        self._stops = tuple(stops)
        self._matchers = [_Matcher(stop) for stop in stops]
        self._held = ""
        self.is_stopped = False
        self.stopped_by: str | None = None

    def feed(self, piece: str, *, may_stop: bool = True) -> str:
        """The text that may be shown now. Empty if the text has stopped before.

        While `may_stop` is false, a complete stop string is ordinary text.
        """
        if self.is_stopped:
            return ""
        text = self._held + piece
        if not may_stop:
            for matcher in self._matchers:
                matcher.pass_over(piece)
            return self._show(text)
        ends = [
            (len(self._held) + end, len(self._held) + end - len(stop), stop)
            for stop, matcher in zip(self._stops, self._matchers, strict=True)
            if (end := matcher.feed(piece)) is not None
        ]
        if ends:
            self.is_stopped, self._held = True, ""
            end, begin, self.stopped_by = min(ends)
            return text[: end if self._is_shown else begin]
        return self._show(text)

    def _show(self, text: str) -> str:
        shown = len(text) - max(matcher.num_matched for matcher in self._matchers)
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """The end of the text that was held back. Call this when no more text can come."""
        tail, self._held = self._held, ""
        return tail


def _borders(stop: str) -> list[int]:
    """The border lengths: for each prefix of `stop`, how long its longest border is.

    A border of a text is a shorter text with which the text both begins and ends.
    """
    borders, num = [0], 0
    for char in stop[1:]:
        while num and char != stop[num]:
            num = borders[num - 1]
        num += char == stop[num]
        borders.append(num)
    return borders
