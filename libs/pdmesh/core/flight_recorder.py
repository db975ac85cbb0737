"""Records the last events of a state machine and their effects, so that an internal error shows
them.

`recorded` wraps a machine's `handle`. The recorder keeps the events and effects themselves, and
turns them into text only when `handle` raises. So a field that must not appear in logs has
`repr=False`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import wraps
from typing import Any, Final, TypeVar, cast

from pdmesh.errors import MeshError

_LENGTH: Final = 16
_MAX_CHARS: Final = 240  # the most characters of one event, and of its effects


class IllegalEvent(Exception):
    """An event that cannot happen in this state. The cause is a bug here, or in the peer that sent
    it.
    """


class FlightRecorder:
    """A bounded ring of (time, event, effects).

    If several events of one kind in a row have no effects, only the last one is kept. So ticks do
    not push out other events.
    """

    __slots__ = ("_steps",)

    def __init__(self) -> None:
        self._steps: deque[tuple[float, object, Any]] = deque(maxlen=_LENGTH)

    def add(self, event: object, effects: Any, now: float) -> None:
        """`effects` is usually a list. It is empty or None if there was nothing to do."""
        steps = self._steps
        if effects or not steps:
            steps.append((now, event, effects))
            return
        _, before, led_to = steps[-1]
        if led_to or type(before) is not type(event):
            steps.append((now, event, effects))
        else:
            steps[-1] = (now, event, effects)

    def __str__(self) -> str:
        return "\n".join(
            f"{now:.3f} {str(event)[:_MAX_CHARS]} -> {str(effects)[:_MAX_CHARS]}"
            for now, event, effects in self._steps
        )


Handle = TypeVar("Handle", bound=Callable[..., Any])  # each machine has its own events and effects


def recorded(handle: Handle) -> Handle:
    """Wrap a machine's `handle(self, event, now)` so that the machine's `recorder` records each
    call.

    If `handle` raises, the error carries the last events as a note. A MeshError is passed on
    without a note: it is an answer, not a bug.
    """

    @wraps(handle)
    def with_steps(machine: Any, event: object, now: float) -> Any:
        try:
            effects = handle(machine, event, now)
        except MeshError:
            raise
        except Exception as error:
            machine.recorder.add(event, "raised", now)
            error.add_note(f"the last events and their effects:\n{machine.recorder}")
            raise
        machine.recorder.add(event, effects, now)
        return effects

    return cast(Handle, with_steps)  # the signature is the same
