"""Shifts the wall clock of a process that has this folder on its PYTHONPATH.

The shift is the number of seconds in the file SKEW_FILE.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

_file = Path(os.environ["SKEW_FILE"])
_time, _time_ns = time.time, time.time_ns


def _shift_s() -> int:
    return int(_file.read_text())


time.time = lambda: _time() + _shift_s()
time.time_ns = lambda: _time_ns() + _shift_s() * 10**9
