"""The last events of a state machine, and what each led to: an internal error shows them.

`with_story` wraps a machine's `handle`. It keeps the events and effects themselves, and makes text
of them only when `handle` raises. So fields that no log may show have `repr=False`.
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


class Story:
    """A bounded ring of steps. A step is a list so that its effects can follow its event."""

    __slots__ = ("steps",)

    def __init__(self) -> None:
        self.steps: deque[list[object]] = deque(maxlen=_LENGTH)

    def __str__(self) -> str:
        return "\n".join(_line(*step) for step in self.steps)


def _line(now: object, event: object, effects: object) -> str:
    return f"{now:.3f} {str(event)[:_MAX_CHARS]} -> {str(effects)[:_MAX_CHARS]}"


Handle = TypeVar("Handle", bound=Callable[..., Any])  # Any: of any machine


def with_story(handle: Handle) -> Handle:
    """`handle(self, event, now)` of a machine that has a `story`, kept there.

    An error that it raises carries the story as a note.
    """

    @wraps(handle)
    def with_steps(machine: Any, event: object, now: float) -> Any:
        step: list[object] = [now, event, "raised"]
        machine.story.steps.append(step)
        try:
            step[2] = effects = handle(machine, event, now)
        except MeshError:  # an answer, not a bug
            raise
        except Exception as error:
            error.add_note(f"the last events and their effects:\n{machine.story}")
            raise
        return effects

    return cast(Handle, with_steps)  # the same call, kept
