"""The processor time that another process has used, from /proc."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """The processor time of all threads of a process so far, or 0 if the process has ended."""
    try:
        line = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0.0
    # The second field is the name of the program, in parentheses. It may contain anything.
    fields = line.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
