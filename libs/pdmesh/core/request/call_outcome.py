"""Decides how a call with one or more choices ended: completed, failed or cancelled, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdmesh.core.request.events import Cancelled, Complete, Fail
from pdmesh.errors import MeshError


@dataclass(frozen=True, slots=True)
class EndedChoice:
    """`outcome`: of its request; None: it still ran. `error`: what the call was ended with, if any.

    `is_stopped`: a stop string or a repetition ended it.
    """

    outcome: Complete | Fail | Cancelled | None
    is_stopped: bool = False
    error: MeshError | None = None

    @property
    def is_answered(self) -> bool:
        """Its client has all of its answer."""
        return isinstance(self.outcome, Complete) or self.is_stopped


def call_outcome(choices: Sequence[EndedChoice]) -> tuple[str, str]:
    """The outcome and its reason.

    One failure is enough for `failed`, and its error has the reason. A call whose client left is
    `cancelled`. The reason of a completed call is the first finish reason of its choices.
    """
    errors = [c.outcome.error for c in choices if isinstance(c.outcome, Fail)]
    errors += [c.error for c in choices if c.error is not None]
    if errors:
        return "failed", errors[0].reason
    if not all(choice.is_answered for choice in choices):
        return "cancelled", "CLIENT_GONE"
    reasons = [c.outcome.finish_reason for c in choices if isinstance(c.outcome, Complete)]
    return "completed", "stop" if choices[0].is_stopped or not reasons else reasons[0]
