"""The last events of a state machine, and what each led to: an internal error shows them.

`recorded` wraps a machine's `handle`. It keeps the events and effects themselves, and turns them
into text only when `handle` raises. So fields that no log may show have `repr=False`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import wraps
from typing import Any, Final, TypeVar, cast

from pdmesh.errors import MeshError

_LENGTH: Final = 16
_MAX_CHARS: Final = 240  # of one event, and of its effects


class IllegalEvent(Exception):
    """An event that cannot happen in this state: a bug here, or in the peer that sent it."""


class FlightRecorder:
    """A bounded ring of (time, event, effects).

    Of several events of one kind in a row that led to nothing, only the last is kept, so that ticks
    do not push out other events.
    """

    __slots__ = ("_steps",)

    def __init__(self) -> None:
        self._steps: deque[tuple[float, object, Any]] = deque(maxlen=_LENGTH)

    def add(self, event: object, effects: Any, now: float) -> None:
        """`effects`: usually a list; empty or None if there was nothing to do."""
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


Handle = TypeVar("Handle", bound=Callable[..., Any])  # Any: of any machine


def recorded(handle: Handle) -> Handle:
    """Wrap a machine's `handle(self, event, now)`: each call is added to the machine's `recorder`.

    An error that `handle` raises carries the last events as a note.
    """

    @wraps(handle)
    def with_steps(machine: Any, event: object, now: float) -> Any:
        try:
            effects = handle(machine, event, now)
        except MeshError:  # an answer, not a bug
            raise
        except Exception as error:
            machine.recorder.add(event, "raised", now)
            error.add_note(f"the last events and their effects:\n{machine.recorder}")
            raise
        machine.recorder.add(event, effects, now)
        return effects

    return cast(Handle, with_steps)  # the signature is the same
