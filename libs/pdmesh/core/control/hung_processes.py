"""Decides which processes are killed because they run and do not answer (S74).

A supervisor waits for the end of a process, and does not see that it hangs. Once the process is
killed, `restart_policy.py` decides when it is started again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

SILENCE_S: Final = 20.0


@dataclass(slots=True)
class HungProcesses:
    _silent_since: dict[str, float] = field(default_factory=dict)

    def probed(self, name: str, now: float, *, is_live: bool) -> bool:
        """Whether to kill the process, which has just been asked whether it is alive."""
        if is_live:
            self._silent_since.pop(name, None)
            return False
        if now - self._silent_since.setdefault(name, now) <= SILENCE_S:
            return False
        del self._silent_since[name]
        return True
