"""Decides how a call ended: completed, failed or cancelled, and why.

A call may ask for several choices, which are alternative answers. Each choice is one request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdmesh.core.request.events import Cancelled, Complete, Fail
from pdmesh.errors import MeshError


@dataclass(frozen=True, slots=True)
class EndedChoice:
    """One choice at the end of its call.

    `outcome` is the outcome of the choice's request, or None if the request was still running. With
    `is_stopped`, a stop string or a repetition ended the answer. `error` is the error that ended
    the call, if any.
    """

    outcome: Complete | Fail | Cancelled | None
    is_stopped: bool = False
    error: MeshError | None = None

    @property
    def is_answered(self) -> bool:
        """Whether the client has the whole answer."""
        return isinstance(self.outcome, Complete) or self.is_stopped


def call_outcome(choices: Sequence[EndedChoice]) -> tuple[str, str]:
    """The outcome of the call, and the reason for it.

    If any choice failed, the call has `failed`, and the reason is that of the first error.
    Otherwise, if any choice is not answered, the client has left and the call is `cancelled`. The
    reason of a completed call is the first finish reason of its choices.
    """
    errors = [c.outcome.error for c in choices if isinstance(c.outcome, Fail)]
    errors += [c.error for c in choices if c.error is not None]
    if errors:
        return "failed", errors[0].reason
    if not all(choice.is_answered for choice in choices):
        return "cancelled", "CLIENT_GONE"
    reasons = [c.outcome.finish_reason for c in choices if isinstance(c.outcome, Complete)]
    return "completed", "stop" if choices[0].is_stopped or not reasons else reasons[0]
