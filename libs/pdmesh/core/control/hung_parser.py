"""Decides when a gateway's parser process hangs and must be killed.

vLLM's parsers, which find tool calls and reasoning in answers, run in a separate process. On a busy
machine, this process may get a hundredth of a core. A limit on elapsed time alone would kill a
process that still works. So the limit applies to the processor time of the process, and separately
to the time in which it uses almost none.
"""

from __future__ import annotations

from typing import Final

_IDLE_SHARE: Final = 0.01  # a process that uses a smaller share of a core does not work
# If the process gets little processor time, a request may take this many times its limit.
_MOST_TIMES: Final = 20


class HungParser:
    """Judges one request after the other. `now` and `cpu_s` are in seconds."""

    def __init__(self) -> None:
        self.begin(0.0, 0.0)

    def begin(self, now: float, cpu_s: float) -> None:
        self._began_at = self._worked_at = now
        self._began_cpu_s = self._seen_cpu_s = cpu_s

    def is_hung(self, limit_s: float, now: float, cpu_s: float) -> bool:
        """Whether the process has worked for `limit_s`, or has done nothing for `limit_s`.

        The process also counts as hung if the request has taken `_MOST_TIMES * limit_s`.
        """
        if cpu_s - self._seen_cpu_s > _IDLE_SHARE * (now - self._worked_at):
            self._worked_at, self._seen_cpu_s = now, cpu_s
        return (
            cpu_s - self._began_cpu_s >= limit_s
            or now - self._worked_at >= limit_s
            or now - self._began_at >= _MOST_TIMES * limit_s
        )
