"""Faults on demand: a test arms `prefill.staged=sigkill@3` and the process dies at the third hit.

Named points are spread over the code that moves requests. An unarmed hit is one look-up in an empty
dict. `sigkill` and `sigstop` act on this process, `raise` raises FailpointHit; any other action
(`zero-kv`, `zero-states`) is returned to the caller, which knows what it means. `@n` fires at the
nth hit only, `@n+` from then on; without either, every hit fires. `name[prefill-0]=...` fires only
for that instance, at points that name one.
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
    """A failpoint armed with `raise` was reached."""


@dataclass(slots=True)
class _Armed:
    action: str
    at: int
    repeats: bool
    num_hits: int = 0


_armed: dict[str, _Armed] = {}


def arm(spec: str) -> None:
    """Arm exactly the points of `spec`: name=action[@n[+]], separated by commas.

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
    """Called at a named point.

    Returns the action if it fires and the caller must do it. `of`: the instance at this point.
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
