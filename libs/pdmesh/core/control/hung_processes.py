"""Decides which processes are killed because they run but do not answer (S74).

A supervisor notices when a process ends, but not when the process hangs. After a hung process is
killed, `restart_policy.py` decides when to start it again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

SILENCE_S: Final = 20.0


@dataclass(slots=True)
class HungProcesses:
    _silent_since: dict[str, float] = field(default_factory=dict)

    def probed(self, name: str, now: float, *, is_live: bool) -> bool:
        """Record the result of a probe. Return whether to kill the process.

        `is_live` says whether the process answered.
        """
        if is_live:
            self._silent_since.pop(name, None)
            return False
        if now - self._silent_since.setdefault(name, now) <= SILENCE_S:
            return False
        del self._silent_since[name]
        return True
