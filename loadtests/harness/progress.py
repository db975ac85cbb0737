"""A progress bar for long measurements: one line on a terminal, one line per step elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Final, TextIO

_WIDTH: Final = 24


class Progress:
    def __init__(self, num_steps: int, out: TextIO = sys.stderr) -> None:
        self._num_steps, self._done, self._out = num_steps, 0, out
        self._began = time.monotonic()

    def step(self, what: str) -> None:
        """Show the step that begins now. Call this once before each step."""
        if self._out.isatty():
            filled = _WIDTH * self._done // self._num_steps
            bar = "█" * filled + "·" * (_WIDTH - filled)
            line = f"{bar} {self._done}/{self._num_steps} {what}{self._left()}"
            self._out.write(f"\r\x1b[2K{line}")
        else:
            self._out.write(f"[{self._done + 1}/{self._num_steps}] {what}\n")
        self._out.flush()
        self._done += 1

    def close(self) -> None:
        if self._out.isatty():
            self._out.write("\r\x1b[2K")
            self._out.flush()

    def _left(self) -> str:
        if not self._done:
            return ""
        seconds = (time.monotonic() - self._began) / self._done * (self._num_steps - self._done)
        return f"  {seconds:.0f} s left"
