"""A progress line on stderr. On a terminal, each change overwrites the line before."""

from __future__ import annotations

import sys

_CLEAR_LINE = "\r\x1b[K"


class ProgressLine:
    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._shown = ""

    def say(self, text: str) -> None:
        if text == self._shown:
            return
        self._shown = text
        if self._is_terminal:
            print(f"{_CLEAR_LINE}{text}", end="", file=sys.stderr, flush=True)
        else:
            print(text, file=sys.stderr, flush=True)

    def end(self) -> None:
        """Clear the line on a terminal, so that further output starts in its place."""
        if self._is_terminal and self._shown:
            print(_CLEAR_LINE, end="", file=sys.stderr, flush=True)
        self._shown = ""
