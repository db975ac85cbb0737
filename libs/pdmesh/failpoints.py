"""Failpoints: named places in the code at which a test makes a process fail.

For example, a test arms `prefill.staged=sigkill@3`, and the process dies when it reaches the point
`prefill.staged` for the third time. The actions `sigkill` and `sigstop` signal this process, and
`raise` raises FailpointHit. Any other action, such as `zero-kv`, is returned to the code at the
point, which acts on it. With `@n`, only the nth hit fires. With `@n+`, the nth and all later hits
fire. Without either, every hit fires. At some points, the code names an instance. There,
`name[prefill-0]=...` fires for prefill-0 only. If no point is armed, a hit costs one check of an
empty dict.
"""

from __future__ import annotations

import os
import re
import signal
from dataclasses import dataclass

_SPEC = re.compile(
    r"(?P<name>[a-z._]+(\[[a-z0-9-]+\])?)=(?P<action>[a-z-]+)(?:@(?P<at>\d+)(?P<on>\+?))?"
)


class FailpointHit(Exception):
    """The code reached a failpoint that was armed with `raise`."""


@dataclass(slots=True)
class _Armed:
    action: str
    at: int
    repeats: bool
    num_hits: int = 0


_armed: dict[str, _Armed] = {}


def arm(spec: str) -> None:
    """Arm the points of `spec` (name=action[@n[+]], separated by commas), and disarm all others.

    Raises ValueError.
    """
    armed: dict[str, _Armed] = {}
    for part in filter(None, (p.strip() for p in spec.split(","))):
        match = _SPEC.fullmatch(part)
        if match is None:
            raise ValueError(f"failpoint {part!r} is not name=action[@n[+]]")
        armed[match["name"]] = _Armed(
            match["action"], int(match["at"] or 1), match["at"] is None or bool(match["on"])
        )
    _armed.clear()
    _armed.update(armed)


def hit(name: str, of: str = "") -> str | None:
    """Do the action of a named point, if it is armed and fires.

    Returns the action if the caller must do it. `of` is the instance that the point concerns.
    """
    if not _armed:
        return None
    point = _armed.get(name) or _armed.get(f"{name}[{of}]")
    if point is None:
        return None
    point.num_hits += 1
    if point.num_hits != point.at and not (point.repeats and point.num_hits > point.at):
        return None
    match point.action:
        case "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "sigstop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "raise":
            raise FailpointHit(name)
        case action:
            return action
    return None
