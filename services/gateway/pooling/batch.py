"""Gets the vectors or scores for one batch of a call's inputs from a pooling instance.

`BatchLife` decides which instance is asked next, and does no I/O. `PoolingBatch` carries out these
decisions, and passes the messages of instances to `BatchLife` as events. A leg is the batch's stay
on one instance, under a key that is never used again. A batch that all instances rejected waits for
a slot in the gateway's waiting room.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import structlog

from pdmesh.core.kv.prefix.block_hash import tokens_to_bytes
from pdmesh.core.model import PeerId, Tick
from pdmesh.core.pooling import batch_life as life
from pdmesh.core.request import events as leg_events
from pdmesh.errors import EngineFailed, MeshError
from pdmesh.net.convert.pooling_facts import task_to_proto
from pdmesh.services.gateway.pooling.spec import PoolingSpec
from pdmesh.services.gateway.request.generation import Collaborators
from pdmesh.services.gateway.routing.sessions import InstanceSession
from pdmesh.v1.common_pb2 import TokenLogprob
from pdmesh.v1.instance_service_pb2 import Abort, Command, Pool, Pooled, SessionEvent

log = structlog.get_logger(__name__)

_GONE: Final = PeerId("", 0)


@dataclass(frozen=True, slots=True)
class BatchIdentity:
    """The identity of one batch in commands to instances.

    `began_at` is the monotonic time at which the batch's call began.
    """

    request_id: str
    traceparent: str
    salt: str
    began_at: float


class PoolingBatch:
    """One batch. Call `run` once for the answer.

    The session, which is the stream to the instance, passes the events of the leg to this object.
    The waiting room calls `on_slot_freed` when an instance has a slot.
    """

    def __init__(
        self, shared: Collaborators, spec: PoolingSpec, places: range, identity: BatchIdentity
    ) -> None:
        self._shared, self._spec, self.places, self._identity = shared, spec, places, identity
        limits = shared.slos.limits_for(spec.scenario, spec.num_tokens)
        self.life = life.BatchLife(limits, shared.budget, identity.began_at, spec.field)
        self.instance_id = ""  # of the instance that accepted the batch
        self.accepted_at = 0.0
        self._done: asyncio.Future[Pooled] = asyncio.get_running_loop().create_future()
        self._session: InstanceSession | None = None
        self._key = 0
        self._asked = _GONE
        self._waiting_number: int | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def run(self) -> Pooled:
        """Return the answer. If the task is cancelled, abort the open leg. Raises MeshError."""
        try:
            self._step(life.Begun())
            return await self._done
        finally:
            self._leave_room()
            self._abort()
            if self._timer is not None:
                self._timer.cancel()

    def _step(self, event: life.Event) -> None:
        now = time.monotonic()
        for effect in self.life.handle(event, now):
            self._carry_out(effect)
        self._set_timer(now)

    def _set_timer(self, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self.life.is_over and not self._done.done():
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(0.0, self.life.wake_at - now), self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._step(Tick())

    def _carry_out(self, effect: life.Effect) -> None:
        match effect:
            case life.Rank(excluded):
                self._leave_room()
                self._rank(excluded)
            case life.SendBatch(instance, attempt):
                self._ask(instance, attempt)
            case life.Abort():
                self._abort()
            case life.WaitForPlace(instances, until):
                self._join_room(instances, until)
            case life.GiveBatchUp(error):
                self._fail(error)
            case life.Done():
                pass  # `_on_pooled` returns the answer to `run`

    def _rank(self, excluded: frozenset[PeerId]) -> None:
        fleet, needs = self._shared.fleet.pooling, self._spec.needs
        if fleet.is_gone(needs):
            self._step(life.RevisionGone())
        else:
            found = fleet.ranked(needs, excluded, self._shared.sessions.num_open)
            self._step(life.Ranked(found))

    def _ask(self, instance: PeerId, attempt: int) -> None:
        record = self._shared.fleet.record(instance.instance_id, instance.incarnation)
        if record is None:
            self._step(life.Unsent())
            return
        session = self._shared.sessions.session(record)
        key = self._shared.next_key()
        self._session, self._key, self._asked = session, key, instance
        self.life.sent(key)
        if not session.open_leg(key, self, self._command(key, attempt)):
            self._session = None
            self._step(life.Unsent())

    def _command(self, key: int, attempt: int) -> Command:
        spec, identity = self._spec, self._identity
        until = identity.began_at + self.life.limits.deadline_s
        pool = Pool(
            key=key,
            request_id=identity.request_id,
            attempt=attempt,
            task=task_to_proto(spec.task),
            inputs=[tokens_to_bytes(spec.inputs[place]) for place in self.places],
            first_lengths=[spec.first_lengths[p] for p in self.places]
            if spec.first_lengths
            else [],
            num_dimensions=spec.num_dimensions,
            remaining_ms=max(1, round(1000 * (until - time.monotonic()))),
            traceparent=identity.traceparent,
            cache_salt=identity.salt,
            model=spec.model.name,
        )
        if spec.use_activation is not None:
            pool.use_activation = spec.use_activation
        return Command(pool=pool)

    def _abort(self) -> None:
        """Abort the open leg, if there is one."""
        session, self._session = self._session, None
        if session is not None:
            session.forget(self._key)
            session.send(Command(abort=Abort(key=self._key)))

    def _join_room(self, instances: Sequence[PeerId], until: float) -> None:
        if not instances:
            return  # the batch waits until the timer asks for a new ranking
        ids = [each.instance_id for each in instances]
        self._waiting_number = self._shared.room.join(self, ids, until, self._spec.tenant)
        if self._waiting_number is None:
            self._step(life.BatchEvicted())

    def _leave_room(self) -> None:
        number, self._waiting_number = self._waiting_number, None
        if number is not None:
            self._shared.room.leave(number)

    def _fail(self, error: MeshError) -> None:
        if not self._done.done():
            self._done.set_exception(error)

    # -- called by the waiting room and the session -----------------------------------------------

    def on_slot_freed(self, instance_id: str) -> None:
        self._waiting_number = None
        self._step(life.PlaceFreed(instance_id))

    def on_evicted(self) -> None:
        self._waiting_number = None
        self._step(life.BatchEvicted())

    def on_token(self, key: int, token_id: int, now: float) -> None:
        """Never called, because no tokens are drawn for a batch."""

    def on_logprobs(self, key: int, logprobs: Sequence[TokenLogprob]) -> None:
        """Never called, because no tokens are drawn for a batch."""

    def on_event(self, event: leg_events.Event, detail: SessionEvent | None = None) -> None:
        match event:
            case leg_events.LegAccepted(key):
                self._on_accepted()
                self._step(life.BatchAccepted(key))
            case leg_events.LegRejected(key):
                self._ended(key)
                self._step(life.BatchRejected(key, event.is_final, event.is_too_long))
            case leg_events.LegFinished(key) if detail is not None:
                self._on_accepted()
                self._ended(key)
                self._on_pooled(key, detail.pooled)
            case leg_events.LegFailed(key):
                self._ended(key)
                self._step(life.BatchFailed(key, event.error, event.is_retryable))
            case leg_events.LegLost(key, was_silent):
                self._ended(key)
                log.info("batch.lost", instance_id=self._asked.instance_id)
                self._step(life.BatchLost(key, was_silent))

    def _on_accepted(self) -> None:
        self.instance_id = self._asked.instance_id
        self.accepted_at = self.accepted_at or time.monotonic()

    def _ended(self, key: int) -> None:
        """Forget the leg with this key. The instance sends no more events for the leg."""
        if self._session is not None and key == self._key:
            self._session.forget(key)
            self._session = None

    def _on_pooled(self, key: int, pooled: Pooled) -> None:
        wanted = self._spec.num_values
        num_bytes = 4 * wanted * len(self.places)
        if pooled.num_values != wanted or len(pooled.values) != num_bytes:
            self._unusable(key, "the instance made vectors of another size")
            return
        if not np.isfinite(np.frombuffer(pooled.values, dtype="<f4")).all():
            self._unusable(key, "the model made numbers that are not finite")
            return
        self._step(life.Answered(key))
        if self.life.is_over and not self._done.done():
            self._done.set_result(pooled)

    def _unusable(self, key: int, message: str) -> None:
        log.warning("batch.unusable", instance_id=self._asked.instance_id, reason=message)
        self._step(life.BatchFailed(key, EngineFailed(message), is_retryable=True))
