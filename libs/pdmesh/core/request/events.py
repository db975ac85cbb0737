"""The events and effects of a request's state machine (`machine.py`).

A plan names candidate instances for a request. A leg is a request's stay on one instance, and a
ticket is the right to pull the KV that a prefill has computed. An early decode begins to pull the
KV before the prefill is done. Tokens and tickets have `repr=False`, because a request's last events
may be logged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal

from pdmesh.core.deadlines import ANSWER_S, HAD_KV_S, LEG_STALL_S
from pdmesh.core.kv.transfer.source_exclusions import NO_EXCLUSIONS, Fit, SourceExclusions
from pdmesh.core.model import Tick
from pdmesh.core.request.poison import MAX_DEATHS
from pdmesh.errors import MeshError

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """An instance that a request may go to.

    Only instances with equal `pair` may hand KV to each other.
    """

    instance_id: str
    incarnation: int
    pair: str = ""  # group, engine fingerprint, revision and KV region, as one text
    is_local: bool = False  # it does both phases (fusion or colocated)
    num_matched_tokens: int = 0
    exclusions: SourceExclusions = NO_EXCLUSIONS  # the prefills that this decode ejects or avoids

    def compatible(self, decodes: Sequence[Candidate]) -> list[Candidate]:
        """The decodes that may pull this prefill's KV. Decodes that avoid the prefill come last."""
        mine = [c for c in decodes if c.pair == self.pair]
        if not any(c.exclusions for c in mine):
            return mine
        fits = [(c.exclusions.fit(self.instance_id), c) for c in mine]
        return [c for wanted in (Fit.GOOD, Fit.AVOIDED) for fit, c in fits if fit is wanted]


@dataclass(frozen=True, slots=True)
class TicketHeld:
    """A ticket for the KV that a prefill holds.

    The ticket is valid for `lease_s` seconds. `wire` is the ticket in the form that the decode
    gets.
    """

    ticket_id: str = field(repr=False)
    lease_s: float
    wire: object = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Loss:
    """An attempt ended at the time `at`, before the answer was complete.

    The next attempt avoids the instances `instance_ids`. There are none if no instance is to blame.
    `num_emitted` is the number of the answer's tokens so far.
    """

    at: float
    instance_ids: tuple[str, ...]
    cause: str
    num_emitted: int


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits on one request. Times are in seconds."""

    deadline_s: float = 600.0  # from submission to the end
    ttft_s: float = 10.0  # until a prefill must have accepted; a migration starts this time again
    answer_s: float = ANSWER_S  # an instance must accept or reject within this time
    # An accepted leg is lost if neither the leg nor its engine makes progress for this time.
    stall_s: float = LEG_STALL_S
    # If the prefill is lost, a decode that has all its KV must report it within this time (F3).
    had_kv_s: float = HAD_KV_S
    # A waiting request tries again after this interval, which doubles each time, up to 2 s.
    retry_s: float = 0.25
    max_migrations: int = 3
    max_deaths: int = MAX_DEATHS  # a request fails if this many instances die with it (F38)
    num_innocent_tokens: int = 16  # a death after this many tokens of a leg does not count
    # A leg without progress is lost after the engine has computed this multiple of the work that it
    # had open.
    max_overtaking: int = 2
    max_candidates: int = 8


# --- events: facts, in the past tense -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Submitted:
    # If set, the request must not join the scenario's queue, and fails.
    refusal: MeshError | None = None


@dataclass(frozen=True, slots=True)
class PlanReceived:
    plan: int  # the number of the AskPlan that this answers; answers to older ones are ignored
    prefills: Sequence[Candidate]
    decodes: Sequence[Candidate]
    prompt_compute_s: float = 0.0  # predicted for an empty cache, or 0 if unknown
    first_token_s: float = 0.0  # predicted time from the plan to token 1, or 0 if unknown
    is_by_master: bool = True  # False if the gateway ranked the instances itself


@dataclass(frozen=True, slots=True)
class PlanFailed:
    plan: int
    error: MeshError


@dataclass(frozen=True, slots=True)
class LegEvent:
    """An event of the leg with this key."""

    key: int


@dataclass(frozen=True, slots=True)
class LegAccepted(LegEvent):
    """An instance has accepted the leg.

    `ticket` is set if a decode may pull the KV of this prefill while it is computed (per layer).
    """

    ticket: TicketHeld | None = None


@dataclass(frozen=True, slots=True)
class LegRejected(LegEvent):
    """An instance has rejected the leg.

    With `is_final`, this instance will not accept it later either. With `is_too_long`, the request
    does not fit on this instance, even if the instance is empty.
    """

    retry_after_s: float = 0.0
    is_final: bool = False
    is_too_long: bool = False
    detail: str = ""  # a fixed sentence from the instance, fit for clients


@dataclass(frozen=True, slots=True)
class FirstToken(LegEvent):
    """The prefill has ended, with token 1.

    Exactly one of `finish_reason` and `ticket` is set, unless the instance also decodes.
    """

    token_id: int = field(repr=False)
    finish_reason: FinishReason | None = None
    ticket: TicketHeld | None = None
    num_cached_tokens: int = 0


class KvStage(IntEnum):
    """How far the KV of a decode leg has come, before the engine can use it."""

    NONE = 0
    PULLING = 1  # the pull has left the pull queue
    ARRIVED = 2  # the KV has arrived, and the leg waits for a place in a step of the engine


@dataclass(frozen=True, slots=True)
class KvAdvanced(LegEvent):
    """The leg's KV has reached a stage.

    Each stage counts once as progress of the leg. A stage does not prove that the engine works.
    """

    stage: KvStage


@dataclass(frozen=True, slots=True)
class LegKvReceived(LegEvent):
    pass


@dataclass(frozen=True, slots=True)
class DecodeTokens(LegEvent):
    token_ids: Sequence[int] = field(repr=False)


@dataclass(frozen=True, slots=True)
class LegFinished(LegEvent):
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class LegFailed(LegEvent):
    """The instance has given up the leg and has released all resources of the leg."""

    error: MeshError
    is_retryable: bool = True


@dataclass(frozen=True, slots=True)
class LegLost(LegEvent):
    """The session with the leg's instance, a stream of messages, is broken.

    With `was_silent`, the session was closed only because the instance was silent. The instance may
    then be alive and only disconnected.
    """

    was_silent: bool = False


@dataclass(frozen=True, slots=True)
class EngineWorked(LegEvent):
    """The engine of the active leg has made progress, as the gateway learned at the time `at`.

    In all, the engine has computed `num_tokens`. Its open legs, including this one, may need
    `num_open_tokens` more.
    """

    at: float
    num_tokens: int
    num_open_tokens: int


@dataclass(frozen=True, slots=True)
class EngineUnknown(LegEvent):
    """The instance of the active leg runs an older release, which does not report engine work."""


@dataclass(frozen=True, slots=True)
class SlotFreed:
    instance_id: str


@dataclass(frozen=True, slots=True)
class WaitRefused:
    """The waiting room is full, or another request has taken this request's place in it."""


@dataclass(frozen=True, slots=True)
class StopMatched:
    """The gateway has found a stop string in the answer."""


@dataclass(frozen=True, slots=True)
class ClientGone:
    pass


Event = (
    LegEvent
    | Submitted
    | PlanReceived
    | PlanFailed
    | SlotFreed
    | WaitRefused
    | StopMatched
    | ClientGone
    | Tick
)

# --- effects: commands to the shell ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AskPlan:
    plan: int
    attempt: int
    excluded: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SendPrefill:
    """Offer the prompt and `num_replayed` emitted tokens to a prefill.

    The answer may have `max_tokens` further tokens.
    """

    key: int
    to: Candidate
    attempt: int
    num_replayed: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class SendStart:
    """Offer a ticket to a decode.

    The offer includes `num_replayed` emitted tokens, of which the prefill has drawn the last one.
    With `is_early`, the prefill has not drawn its token yet. `SendJoin` sends that token later, and
    `max_tokens` does not include it.
    """

    key: int
    to: Candidate
    attempt: int
    ticket: TicketHeld
    num_replayed: int
    max_tokens: int
    is_early: bool = False


@dataclass(frozen=True, slots=True)
class SendJoin:
    """Send token 1 to an early decode, which continues from it."""

    key: int
    token_id: int = field(repr=False)


@dataclass(frozen=True, slots=True)
class AbortLeg:
    key: int


@dataclass(frozen=True, slots=True)
class ReleaseTicket:
    key: int  # of the prefill leg that made it
    ticket_id: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class ForgetLeg:
    """Forget this leg's key, because no more events of the leg are expected."""

    key: int


@dataclass(frozen=True, slots=True)
class EmitTokens:
    token_ids: Sequence[int] = field(repr=False)


@dataclass(frozen=True, slots=True)
class WaitForSlot:
    """Wait in the waiting room for a free slot of one of these instances.

    `until` is the deadline by which the room orders requests. `num_tokens` is the number of tokens
    that a prefill must compute, or 0 for a decode.
    """

    instance_ids: tuple[str, ...]
    until: float
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class LeaveRoom:
    """Leave the waiting room, if the request is still in it."""


@dataclass(frozen=True, slots=True)
class EnterQueue:
    """Count the request in the scenario's queue.

    All prefills of its plan have rejected the request, and no prefill has accepted it since.
    """


@dataclass(frozen=True, slots=True)
class LeaveQueue:
    pass


@dataclass(frozen=True, slots=True)
class Complete:
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class Fail:
    error: MeshError


@dataclass(frozen=True, slots=True)
class Cancelled:
    pass


Effect = (
    AskPlan
    | SendPrefill
    | SendStart
    | SendJoin
    | AbortLeg
    | ReleaseTicket
    | ForgetLeg
    | EmitTokens
    | WaitForSlot
    | LeaveRoom
    | EnterQueue
    | LeaveQueue
    | Complete
    | Fail
    | Cancelled
)
