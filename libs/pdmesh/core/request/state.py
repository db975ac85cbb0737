"""What one request holds and by when it must make progress; `machine.py` decides what happens to
it.

At most one leg is active at a time, and at most one ticket is open beside it. While a prefill hands
its KV on layer by layer, an `EarlyDecode` waits beside it and becomes the active leg at token 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from pdmesh.core.request.early_decode import EarlyDecode, EarlyLeg
from pdmesh.core.request.events import (
    AbortLeg,
    Cancelled,
    Candidate,
    Complete,
    Effect,
    Fail,
    FinishReason,
    ForgetLeg,
    KvStage,
    LegRejected,
    ReleaseTicket,
    RequestLimits,
    TicketHeld,
)
from pdmesh.core.request.poison import Victim
from pdmesh.core.request.retry_budget import RetryBudget
from pdmesh.errors import (
    InvalidRequest,
    MeshError,
    NoInstance,
    Overloaded,
)

_MAX_RETRY_S: Final = 2.0
_MIN_RETRY_S: Final = 0.01


class RequestPhase(Enum):
    NEW = "new"
    PLANNING = "planning"
    WAITING_PLAN = "waiting_plan"  # lost a leg, and nothing could take over yet
    PREFILL_OFFERED = "prefill_offered"
    WAITING_PREFILL = "waiting_prefill"  # in the waiting room
    PREFILLING = "prefilling"
    DECODE_OFFERED = "decode_offered"
    WAITING_DECODE = "waiting_decode"  # in the waiting room, holding a ticket
    DECODING = "decoding"
    ENDED = "ended"


WAITING: Final = frozenset({RequestPhase.WAITING_PREFILL, RequestPhase.WAITING_DECODE})
# No prefill has accepted the request, or the one that had is lost.
UNPLACED: Final = frozenset(
    {
        RequestPhase.PLANNING,
        RequestPhase.WAITING_PLAN,
        RequestPhase.PREFILL_OFFERED,
        RequestPhase.WAITING_PREFILL,
    }
)


@dataclass(frozen=True, slots=True)
class OpenTicket:
    """A finished prefill's KV, which its instance holds for us until `until`."""

    key: int  # of the prefill leg
    holder: Candidate
    held: TicketHeld
    until: float


class RequestState:
    """Only `Request` changes it. Times are on the caller's clock, in seconds; inf: not set."""

    __slots__ = (
        "_answer_by",
        "_budget",
        "_candidates",
        "_deadline",
        "_decodes",
        "_decoding_key",
        "_early",
        "_excluded",
        "_has_asked_again",
        "_kv_by",
        "_kv_stage",
        "_last_error",
        "_leg",
        "_leg_began_at",
        "_limits",
        "_max_tokens",
        "_next_key",
        "_num_at_death",
        "_num_prompt_tokens",
        "_out_of_reach",
        "_plan",
        "_progress_at",
        "_retry_at",
        "_retry_s",
        "_stop_token_ids",
        "_ticket",
        "_too_small",
        "_tried",
        "_ttft_by",
        "_turn_by",
        "_turn_of",
        "_victims",
        "_worked_at",
        "attempt",
        "decode_id",
        "emitted",
        "num_cached_tokens",
        "num_migrations",
        "num_rejections",
        "outcome",
        "phase",
        "prefill_id",
        "prompt_compute_s",
    )

    def __init__(
        self,
        max_tokens: int,
        *,
        limits: RequestLimits,
        budget: RetryBudget,
        next_key: Callable[[], int],
        num_prompt_tokens: int = 0,
        stop_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        assert max_tokens >= 1
        self.phase = RequestPhase.NEW
        self.emitted: list[int] = []
        self.attempt = 0
        self.num_rejections = 0
        self.num_migrations = 0
        self.num_cached_tokens = 0
        self.prefill_id = ""
        self.prompt_compute_s = 0.0  # as the last plan predicts
        self.decode_id = ""
        self.outcome: Complete | Fail | Cancelled | None = None
        self._max_tokens = max_tokens
        self._num_prompt_tokens = num_prompt_tokens
        self._stop_token_ids = stop_token_ids
        self._limits = limits
        self._budget = budget
        self._next_key = next_key
        self._plan = 0
        self._excluded: dict[str, None] = {}
        self._out_of_reach: dict[str, None] = {}  # prefills whose KV a decode could not have
        self._too_small: dict[str, None] = {}  # instances that could not take it even when empty
        self._has_asked_again = False  # with only these two excluded, since it last waited
        self._candidates: list[Candidate] = []
        self._decodes: list[Candidate] = []
        self._tried = 0
        self._leg: EarlyLeg | None = None
        self._leg_began_at = 0  # tokens emitted by then
        self._victims: dict[Victim, None] = {}  # instances that apparently died of it
        self._num_at_death = 0  # tokens emitted when the last of them died
        self._ticket: OpenTicket | None = None
        self._early: EarlyDecode | None = None
        self._decoding_key = 0
        self._last_error: MeshError | None = None
        self._deadline = self._ttft_by = self._answer_by = self._retry_at = math.inf
        # The ticket's holder is lost: by then a decode has said whether it has the KV.
        self._kv_by = math.inf
        self._retry_s = limits.retry_s
        self._progress_at = 0.0  # of the active leg
        self._kv_stage = KvStage.NONE  # of the decode that is the active leg
        self._worked_at = -math.inf  # of the engine that has it
        self._turn_of = -math.inf  # the progress since which `_turn_by` holds
        self._turn_by = 0  # once the engine has computed so many tokens, it has forgotten the leg

    @property
    def wake_at(self) -> float:
        """When a Tick is due."""
        match self.phase:
            case RequestPhase.ENDED:
                return math.inf
            case RequestPhase.PLANNING:
                due = self._ttft_by
            case RequestPhase.PREFILL_OFFERED:
                due = min(self._answer_by, self._ttft_by)
            case RequestPhase.DECODE_OFFERED:
                due = min(self._answer_by, self._kv_by)
            case RequestPhase.WAITING_PREFILL | RequestPhase.WAITING_PLAN:
                due = min(self._retry_at, self._ttft_by)
            case RequestPhase.WAITING_DECODE:
                assert self._ticket is not None
                due = min(self._retry_at, self._ticket.until)
            case RequestPhase.DECODING:
                due = min(self._silent_at, self._kv_by)
            case RequestPhase.PREFILLING:
                answer_by = self._early.answer_by if self._early is not None else math.inf
                due = min(self._silent_at, answer_by)
            case _:
                due = math.inf
        return min(due, self._deadline)

    @property
    def _silent_at(self) -> float:
        """When the accepted leg counts as dead, if neither it nor its engine makes progress."""
        return max(self._progress_at, self._worked_at) + self._limits.stall_s

    @property
    def computing_key(self) -> int | None:
        """The key of the accepted leg: its engine's progress is worth telling (`EngineWorked`)."""
        is_accepted = self.phase in {RequestPhase.PREFILLING, RequestPhase.DECODING}
        return self._leg.key if is_accepted and self._leg is not None else None

    @property
    def num_remaining(self) -> int:
        return self._max_tokens - len(self.emitted)

    def is_current(self, key: int) -> bool:
        """Whether `key` names the active leg; the output of any other is to be dropped."""
        return self._leg is not None and self._leg.key == key

    def check_invariants(self) -> None:
        has_leg = self._leg is not None
        needs_leg = {
            RequestPhase.PREFILL_OFFERED,
            RequestPhase.PREFILLING,
            RequestPhase.DECODE_OFFERED,
            RequestPhase.DECODING,
        }
        assert has_leg == (self.phase in needs_leg), self.phase
        if self._ticket is not None:
            assert self.phase in {
                RequestPhase.DECODE_OFFERED,
                RequestPhase.WAITING_DECODE,
                RequestPhase.DECODING,
            }
        assert self._early is None or self.phase is RequestPhase.PREFILLING
        if self.phase in {RequestPhase.DECODE_OFFERED, RequestPhase.WAITING_DECODE}:
            assert self._ticket is not None, self.phase
        assert self._kv_by == math.inf or (has_leg and self._ticket is not None)
        assert len(self.emitted) <= self._max_tokens
        assert (self.outcome is not None) == (self.phase is RequestPhase.ENDED)
        assert self.num_migrations <= self._limits.max_migrations
        assert not self._decoding_key or (
            self._ticket is None and self.is_current(self._decoding_key)
        )

    # --- legs and tickets ------------------------------------------------------------------------

    def _open_leg(self, to: Candidate, now: float) -> EarlyLeg:
        self._leg = leg = EarlyLeg(self._next_key(), to)
        self._leg_began_at = len(self.emitted)
        self._answer_by = now + self._limits.answer_s
        return leg

    def _close_leg(self) -> tuple[list[Effect], Candidate]:
        """The active leg ended by itself."""
        assert self._leg is not None
        leg, self._leg = self._leg, None
        self._decoding_key = 0
        return [ForgetLeg(leg.key)], leg.to

    def _drop_all(self) -> list[Effect]:
        """Abort the active leg and the early decode, and release the open ticket."""
        effects: list[Effect] = []
        if self._leg is not None:
            effects.append(AbortLeg(self._leg.key))
        if self._early is not None:
            self.num_rejections += self._early.num_rejections
            effects += self._early.drop()
            self._early = None
        if self._ticket is not None:
            ticket, is_lost = self._ticket, self._kv_by < math.inf
            release = ReleaseTicket(ticket.key, ticket.held.ticket_id)
            effects.append(ForgetLeg(ticket.key) if is_lost else release)
        self._leg, self._ticket, self._decoding_key, self._kv_by = None, None, 0, math.inf
        return effects

    def _end(self, outcome: Complete | Fail | Cancelled) -> list[Effect]:
        effects = self._drop_all()
        self.phase = RequestPhase.ENDED
        self.outcome = outcome
        return [*effects, outcome]

    # --- tokens ----------------------------------------------------------------------------------

    def _append(self, token_ids: Sequence[int]) -> Sequence[int]:
        taken = token_ids[: self.num_remaining]
        self.emitted.extend(taken)
        return taken

    def _count_death(self) -> None:
        """The active leg's instance died. An instance that is only silent does not count.

        A prompt that kills instances does so at once. A death after `num_innocent_tokens` is not
        the request's doing, and it clears the deaths before it, too.
        """
        assert self._leg is not None
        if len(self.emitted) - self._leg_began_at >= self._limits.num_innocent_tokens:
            self._victims.clear()
        else:
            self._victims[self._leg.to.instance_id, self._leg.to.incarnation] = None
            self._num_at_death = len(self.emitted)

    @property
    def num_deaths(self) -> int:
        return len(self._victims)

    @property
    def deaths_witnessed(self) -> Sequence[Victim]:
        """Instances that died while they had it; none if it got a token elsewhere since."""
        return () if len(self.emitted) > self._num_at_death else tuple(self._victims)

    def _reason_if_complete(self) -> FinishReason | None:
        """Set if the last token was emitted: a leg lost before it said so has lost nothing."""
        if self.emitted and self.emitted[-1] in self._stop_token_ids:
            return "stop"
        return "length" if self.num_remaining == 0 else None

    # --- waiting ---------------------------------------------------------------------------------

    def _schedule_retry(self, now: float, hint_s: float) -> list[Effect]:
        self._retry_at = now + max(_MIN_RETRY_S, hint_s, self._retry_s)
        self._retry_s = min(_MAX_RETRY_S, self._retry_s * 2)
        return []

    def _after_rejection(self, event: LegRejected) -> MeshError:
        if event.is_too_long:
            return _too_long(event.detail)
        if event.is_final:
            return NoInstance("no instance takes new work")
        return self._overloaded(event.retry_after_s)

    def _overloaded(self, retry_after_s: float = 0.0) -> Overloaded:
        retry_after_ms = max(1000, math.ceil(retry_after_s * 1000))
        return Overloaded("all instances are busy", retry_after_ms=retry_after_ms)


def _too_long(detail: str) -> InvalidRequest:
    message = "prompt and max_tokens fit no instance"
    return InvalidRequest(
        f"{message}: {detail}" if detail else message,
        reason="CONTEXT_LENGTH_EXCEEDED",
        field="max_tokens",
    )
