"""Decides where one batch of inputs is sent, and what follows if an instance refuses it or is lost.

Pooling instances make vectors or scores, and keep no state of a batch. If an instance is lost, its
batch runs again on another one, as often as `max_migrations` and the gateway's retry budget allow.
A batch that has killed two instances or their engines is not tried a third time (F38).

If all instances are full, the batch is put into the waiting room, the gateway's queue for free
slots. A batch waits for a slot for at most `ttft_s`, counted from its beginning or its last loss.
Once an instance has accepted the batch, only the call's deadline bounds the time. If an instance's
engine hangs, the instance ends itself. If an instance is frozen, its session, the stream between
gateway and instance, breaks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from pdmesh.core.model import PeerId, Tick
from pdmesh.core.request.events import RequestLimits
from pdmesh.core.request.poison import Victim
from pdmesh.core.request.retry_budget import RetryBudget
from pdmesh.errors import (
    DeadlineExceeded,
    InstanceLost,
    InvalidRequest,
    MeshError,
    NoInstance,
    Overloaded,
    PoisonRequest,
)


class ModelReplaced(NoInstance):
    """The model was replaced during a call. Vectors of the two models must not be mixed."""


@dataclass(frozen=True, slots=True)
class Begun:
    """The batch may be sent."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """All instances that may take the batch, best first."""

    instances: Sequence[PeerId]


@dataclass(frozen=True, slots=True)
class RevisionGone:
    """Only other revisions of the batch's model are served now."""


@dataclass(frozen=True, slots=True)
class Unsent:
    """The instance that was asked last is gone, or cannot be reached now."""


@dataclass(frozen=True, slots=True)
class BatchAccepted:
    key: int


@dataclass(frozen=True, slots=True)
class BatchRejected:
    """The instance refused the batch.

    `is_final` means that the instance will also refuse the batch later.
    """

    key: int
    is_final: bool = False
    is_too_long: bool = False


@dataclass(frozen=True, slots=True)
class Answered:
    key: int


@dataclass(frozen=True, slots=True)
class BatchFailed:
    key: int
    error: MeshError
    is_retryable: bool


@dataclass(frozen=True, slots=True)
class BatchLost:
    """The session with the instance broke.

    `was_silent` means that silence was the only sign of this. The instance may still be alive
    behind a cut cable.
    """

    key: int
    was_silent: bool = False


@dataclass(frozen=True, slots=True)
class PlaceFreed:
    """It is the batch's turn in the waiting room: this instance has a slot."""

    instance_id: str


@dataclass(frozen=True, slots=True)
class BatchEvicted:
    """The waiting room is full, and has removed the batch."""


Event = (
    Begun
    | Ranked
    | RevisionGone
    | Unsent
    | BatchAccepted
    | BatchRejected
    | Answered
    | BatchFailed
    | BatchLost
    | PlaceFreed
    | BatchEvicted
    | Tick
)


@dataclass(frozen=True, slots=True)
class Rank:
    """Ask which instances may take the batch. The caller answers with `Ranked`."""

    excluded: frozenset[PeerId]


@dataclass(frozen=True, slots=True)
class SendBatch:
    """Send the batch, and then call `BatchLife.sent`."""

    instance: PeerId
    attempt: int


@dataclass(frozen=True, slots=True)
class Abort:
    """Abort the last attempt, because it took too long."""


@dataclass(frozen=True, slots=True)
class WaitForPlace:
    """Join the waiting room for these instances. If there are none, only time ends the wait."""

    instances: tuple[PeerId, ...]
    until: float


@dataclass(frozen=True, slots=True)
class Done:
    """The batch has its answer."""


@dataclass(frozen=True, slots=True)
class GiveBatchUp:
    error: MeshError


Effect = Rank | SendBatch | Abort | WaitForPlace | Done | GiveBatchUp


_MOST_RETRY_S: Final = 2.0
_MOST_AWAITED: Final = 64  # the most instances that a waiting batch names
_ENGINE_DIED: Final = "ENGINE_DIED"


@dataclass(slots=True)
class BatchLife:
    """The state of one batch. Only `handle` changes it. `began_at` is when the call began.

    Call `handle(Tick())` at `wake_at`.
    """

    limits: RequestLimits
    budget: RetryBudget
    began_at: float
    field_of_inputs: str = "input"
    num_rejections: int = 0
    num_losses: int = 0
    victims: dict[Victim, None] = field(default_factory=dict)  # instances that died while it ran
    wake_at: float = math.inf
    is_over: bool = False
    is_answered: bool = False
    attempt: int = 0
    _key: int = 0  # the key of the present attempt; events with other keys are ignored
    _asked: PeerId | None = None
    _is_accepted: bool = False
    _is_waiting: bool = False
    _num_waits: int = 0
    _wait_by: float = math.inf
    _queue: list[PeerId] = field(default_factory=list)
    _rest: list[PeerId] = field(default_factory=list)  # instances that this round does not ask
    _busy: list[PeerId] = field(default_factory=list)
    _freed_id: str = ""  # the instance that has a slot for the batch
    _asked_before: set[PeerId] = field(default_factory=set)  # instances that earlier rounds asked
    _excluded: set[PeerId] = field(default_factory=set)

    def sent(self, key: int) -> None:
        """The batch was sent. Events about this attempt carry `key`."""
        self._key = key

    def handle(self, event: Event, now: float) -> list[Effect]:
        if self.is_over:
            return []
        if isinstance(event, BatchAccepted | BatchRejected | Answered | BatchFailed | BatchLost):
            return self._heard(event, now) if self._is_heard(event.key) else []
        match event:
            case Begun():
                self._wait_by = now + self.limits.ttft_s
                return [self._rank()]
            case Ranked(instances):
                return self._begin_round(instances, now)
            case RevisionGone():
                return self._give_up(ModelReplaced("the model was replaced during this call"))
            case Unsent():
                self._forget_asked()
                return self._next(now)
            case PlaceFreed(instance_id) if self._is_waiting:
                self._freed_id = instance_id
                return [self._rank()]
            case BatchEvicted() if self._is_waiting:
                return self._give_up(Overloaded("too many requests are waiting"))
            case Tick():
                return self._tick(now)
        return []

    def _is_heard(self, key: int) -> bool:
        return self._asked is not None and key == self._key

    def _heard(
        self, event: BatchAccepted | BatchRejected | Answered | BatchFailed | BatchLost, now: float
    ) -> list[Effect]:
        assert self._asked is not None
        match event:
            case BatchAccepted():
                self._is_accepted = True
                self.wake_at = self.began_at + self.limits.deadline_s
                return []
            case BatchRejected():
                self.num_rejections += 1
                return self._rejected(event, now)
            case Answered():
                self.is_over = self.is_answered = True
                return [Done()]
            case BatchFailed(_, error, is_retryable):
                if error.reason == _ENGINE_DIED:
                    self._count_death(self._asked)
                return self._again(error, now) if is_retryable else self._give_up(error)
            case BatchLost(_, was_silent):
                if not was_silent:
                    self._count_death(self._asked)
                lost = InstanceLost("the instances that computed this request were lost")
                return self._again(lost, now)

    def _count_death(self, instance: PeerId) -> None:
        self.victims[instance.instance_id, instance.incarnation] = None

    def _rejected(self, event: BatchRejected, now: float) -> list[Effect]:
        assert self._asked is not None
        if event.is_too_long:
            message = "an input is longer than the model's context"
            return self._give_up(InvalidRequest(message, field=self.field_of_inputs))
        if event.is_final:
            self._exclude()
        else:
            self._busy.append(self._asked)
            self._forget_asked()
        return self._next(now)

    def _again(self, error: MeshError, now: float) -> list[Effect]:
        self._exclude()
        self.num_losses += 1
        if len(self.victims) >= self.limits.max_deaths:
            return self._give_up(PoisonRequest("instances died while they computed this"))
        if self.num_losses > self.limits.max_migrations or not self.budget.spend():
            return self._give_up(error)
        self._wait_by = now + self.limits.ttft_s
        return [self._rank()]

    def _rank(self) -> Rank:
        self._is_waiting = False
        self._forget_asked()
        return Rank(frozenset(self._excluded))

    def _begin_round(self, instances: Sequence[PeerId], now: float) -> list[Effect]:
        """Ask the instance that has a slot first, and instances of earlier rounds last.

        So if a large fleet is full, each round asks other instances.
        """
        if self._asked_before.issuperset(instances):
            self._asked_before.clear()
        freed, self._freed_id = self._freed_id, ""
        order = sorted(instances, key=lambda i: (i.instance_id != freed, i in self._asked_before))
        num_asked = self.limits.max_candidates
        self._queue, self._rest, self._busy = order[:num_asked], order[num_asked:], []
        return self._next(now)

    def _next(self, now: float) -> list[Effect]:
        """Send the batch to the next instance, or wait for one if none is left."""
        if self._queue:
            self._asked = self._queue.pop(0)
            self._asked_before.add(self._asked)
            self.attempt += 1
            self._is_accepted = False
            self.wake_at = now + self.limits.answer_s
            return [SendBatch(self._asked, self.attempt)]
        if now >= self._wait_by:
            return self._out_of_time()
        awaited = [*self._busy, *self._rest][:_MOST_AWAITED]
        if not awaited:
            self._excluded.clear()  # no other instance is left, and excluded ones may work again
        self._is_waiting = True
        wait_s = min(_MOST_RETRY_S, self.limits.retry_s * 2.0 ** min(self._num_waits, 16))
        self._num_waits += 1
        self.wake_at = min(self._wait_by, now + wait_s)
        return [WaitForPlace(tuple(awaited), self._wait_by)]

    def _tick(self, now: float) -> list[Effect]:
        if now < self.wake_at:
            return []
        if now >= self.began_at + self.limits.deadline_s:
            aborts: list[Effect] = [Abort()] if self._asked is not None else []
            return [*aborts, *self._give_up(DeadlineExceeded("the request took too long"))]
        if self._is_waiting:
            return self._out_of_time() if now >= self._wait_by else [self._rank()]
        if self._asked is not None and not self._is_accepted:
            self._exclude()
            return [Abort(), *self._next(now)]
        return []

    def _out_of_time(self) -> list[Effect]:
        if self._busy:  # an instance of the last round was full
            return self._give_up(Overloaded("no instance had a free slot in time"))
        return self._give_up(NoInstance("no instance serves this model now"))

    def _exclude(self) -> None:
        if self._asked is not None:
            self._excluded.add(self._asked)
        self._forget_asked()

    def _forget_asked(self) -> None:
        self._asked, self._is_accepted = None, False

    def _give_up(self, error: MeshError) -> list[Effect]:
        self.is_over = True
        return [GiveBatchUp(error)]

    def check_invariants(self) -> None:
        assert not (self._is_waiting and self._asked is not None)
        assert self._asked not in self._excluded
        assert self.num_losses <= self.limits.max_migrations + 1
