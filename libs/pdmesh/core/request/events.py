"""What happens to a request (events) and what must be done about it (effects); see `machine.py`.

Tokens and tickets have `repr=False`: a request's last events may be logged.
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
    """An instance a request may go to. KV may go only between instances with an equal `pair`."""

    instance_id: str
    incarnation: int
    pair: str = ""  # group, fingerprint, revision and region of KV
    is_local: bool = False  # fusion or colocated: it also decodes what it prefilled
    num_matched_tokens: int = 0
    exclusions: SourceExclusions = NO_EXCLUSIONS  # of a decode: prefills that it ejects or avoids

    def compatible(self, decodes: Sequence[Candidate]) -> list[Candidate]:
        """The decodes that may take this prefill's KV; those that avoid this prefill come last."""
        mine = [c for c in decodes if c.pair == self.pair]
        if not any(c.exclusions for c in mine):
            return mine
        fits = [(c.exclusions.fit(self.instance_id), c) for c in mine]
        return [c for wanted in (Fit.GOOD, Fit.AVOIDED) for fit, c in fits if fit is wanted]


@dataclass(frozen=True, slots=True)
class TicketHeld:
    """The staged KV of a finished prefill. `wire`: the ticket as the decode gets it."""

    ticket_id: str = field(repr=False)
    lease_s: float
    wire: object = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Loss:
    """An attempt ended without an answer, at `at`. `instance_ids`: those that the next attempt
    avoids; empty if none is to blame. `num_emitted`: tokens of the answer so far.
    """

    at: float
    instance_ids: tuple[str, ...]
    cause: str
    num_emitted: int


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Bounds on one request. Times are in seconds from its submission or its last progress."""

    deadline_s: float = 600.0
    ttft_s: float = 10.0  # until a prefill must have accepted; renewed by a migration
    answer_s: float = ANSWER_S  # an instance accepts or rejects within it
    # An accepted leg is lost after this time without a token of its own or a sign of its engine's
    # work.
    stall_s: float = LEG_STALL_S
    # When an instance is lost, a decode that had all KV from it says so within this time (F3).
    had_kv_s: float = HAD_KV_S
    retry_s: float = 0.25  # while waiting, ask for a new plan at least this often (doubles to 2 s)
    max_migrations: int = 3
    max_deaths: int = MAX_DEATHS  # of instances; then the request is to blame (F38)
    num_innocent_tokens: int = 16  # a death later than this many tokens into its leg is not counted
    # A leg without progress is lost once its engine has computed this multiple of its open work.
    max_overtaking: int = 2
    max_candidates: int = 8


# --- events: facts, in the past tense -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Submitted:
    refusal: MeshError | None = None  # why it should not join its queue


@dataclass(frozen=True, slots=True)
class PlanReceived:
    plan: int  # number of the AskPlan it answers; answers to older ones are ignored
    prefills: Sequence[Candidate]
    decodes: Sequence[Candidate]
    prompt_compute_s: float = 0.0  # predicted, with nothing cached; 0: not known
    first_token_s: float = 0.0  # from the plan to token 1, as predicted; 0: not known
    is_by_master: bool = True  # False: the gateway ranked the instances itself


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
    """`ticket` is set if the KV of this prefill may be pulled while it is computed (per layer)."""

    ticket: TicketHeld | None = None


@dataclass(frozen=True, slots=True)
class LegRejected(LegEvent):
    """`is_final`: this instance will not take it later either.

    `is_too_long`: no instance of its kind would take it.
    """

    retry_after_s: float = 0.0
    is_final: bool = False
    is_too_long: bool = False
    detail: str = ""  # a fixed sentence from the instance, fit for clients


@dataclass(frozen=True, slots=True)
class FirstToken(LegEvent):
    """Prefill ended.

    Unless the leg is local, exactly one of `finish_reason` and `ticket` is set.
    """

    token_id: int = field(repr=False)
    finish_reason: FinishReason | None = None
    ticket: TicketHeld | None = None
    num_cached_tokens: int = 0


class KvStage(IntEnum):
    """How far the KV of a decode leg has come. The decode cannot use it yet."""

    NONE = 0
    PULLING = 1  # its turn in the pull queue has come
    ARRIVED = 2  # the KV is there; the leg waits for a place in a step of the engine


@dataclass(frozen=True, slots=True)
class KvAdvanced(LegEvent):
    """The leg's KV reached a stage.

    Each stage counts as progress of the leg once. It does not show that the engine works.
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
    """The instance gave the leg up and holds nothing of it."""

    error: MeshError
    is_retryable: bool = True


@dataclass(frozen=True, slots=True)
class LegLost(LegEvent):
    """The session with the leg's instance broke.

    `was_silent`: only because it fell silent; the instance may be alive beyond a cut cable.
    """

    was_silent: bool = False


@dataclass(frozen=True, slots=True)
class EngineWorked(LegEvent):
    """The engine that has the active leg computed something; the gateway learned it at `at`.

    It has computed `num_tokens` by then. All its open legs, this one included, may take
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
    """The waiting room is full."""


@dataclass(frozen=True, slots=True)
class StopMatched:
    """The gateway found a stop string in the text so far."""


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
    """Offer the prompt and `num_replayed` emitted tokens; `max_tokens` more may be produced."""

    key: int
    to: Candidate
    attempt: int
    num_replayed: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class SendStart:
    """Offer a ticket. The last of the `num_replayed` emitted tokens is the one prefill drew.

    `is_early`: prefill has not drawn that token yet. SendJoin will tell it, and `max_tokens` counts
    what follows it.
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
    """Tell a decode that was started early from which token it continues."""

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
    """Nothing more is expected under this key."""

    key: int


@dataclass(frozen=True, slots=True)
class EmitTokens:
    token_ids: Sequence[int] = field(repr=False)


@dataclass(frozen=True, slots=True)
class WaitForSlot:
    """Wait in the waiting room for a free slot of one of these instances.

    `until`: the deadline by which the room orders requests. `num_tokens`: what the instance would
    compute; 0 for a decode.
    """

    instance_ids: tuple[str, ...]
    until: float
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class LeaveRoom:
    """Leave the waiting room, if the request is still in it."""


@dataclass(frozen=True, slots=True)
class EnterQueue:
    """Count in the scenario's queue: a prefill has rejected the request, and none has taken it."""


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
