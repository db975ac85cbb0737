"""Shows progress on stderr: one line that is rewritten on a terminal, else a line per change."""

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
        """Clear the line on a terminal, so that the next output replaces it."""
        if self._is_terminal and self._shown:
            print(_CLEAR_LINE, end="", file=sys.stderr, flush=True)
        self._shown = ""
