"""Begins and ends the legs of an instance: admission, jobs for the engine, freeing of memory.

A leg is a request's stay on this instance. The admission core may refuse a leg. This module refuses
a decode if its KV is on an instance that this one has ejected as a source. Both decisions are made
without the engine (S40). The KV of a prefill waits in a range of memory. A ticket is a decode's
right to pull this KV. So the slot and the range of the prefill are freed only when the ticket
closes (S41).

In per-layer mode, the ticket opens while the prefill computes. An early decode, which is chosen at
that time, pulls the KV of each layer as soon as the layer is computed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import structlog

from pdmesh.core.deadlines import TRANSFER_STALL_S, TRANSFER_TIMEOUT_S
from pdmesh.core.health.outlier_detection import Vitals
from pdmesh.core.instance.admission import (
    Admission,
    Admitted,
    Ask,
    RefusalReason,
    Refused,
    Work,
)
from pdmesh.core.instance.prompt_times import LoadBook
from pdmesh.core.kv.layout.compatibility import all_bytes
from pdmesh.core.kv.transfer.source_exclusions import KvSource
from pdmesh.core.kv.transfer.ticket import PullFailure, make_ticket_id
from pdmesh.engine.base import (
    ArenaRange,
    DecodeJob,
    EncodeJob,
    EncoderEngine,
    Engine,
    Failed,
    PoolingEngine,
    PoolJob,
    PrefillJob,
    hands_on,
)
from pdmesh.errors import (
    AdapterUnusable,
    ConstraintUnsatisfiable,
    ImageMisfit,
    ImageUnusable,
    InvalidRequest,
    KvTransferFailed,
)
from pdmesh.instance.legs import convert, instruments, spans
from pdmesh.instance.legs.kv_source_reports import KvSourceReports
from pdmesh.instance.legs.legs import Leg, LegTable
from pdmesh.instance.legs.outbox import Outbox
from pdmesh.telemetry import names
from pdmesh.v1.instance_service_pb2 import (
    KV_STAGE_PULLING,
    KV_TRANSFER_PER_LAYER,
    Embedded,
    Encode,
    Pool,
    Prefill,
    Start,
)

log = structlog.get_logger(__name__)

# A decode's acceptance waits for this time, and is left out if the leg's next event comes first. A
# prefill's acceptance does not wait, because gateways measure the prefill time T_p from it.
_HOLD_ACCEPTED_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class PullLimits:
    """Bounds of one pull of KV. They apply even if the request's deadline leaves more time."""

    timeout_s: float = TRANSFER_TIMEOUT_S
    stall_s: float = TRANSFER_STALL_S  # longest time without any bytes, once prefill is done


class LegLife:
    """The open legs of an instance, and their beginning and end.

    `on_late` is called when a timeout of this module has ended a leg. `new_secret` makes the secret
    part of a ticket's id.
    """

    def __init__(
        self,
        engine: Engine,
        admission: Admission,
        clock: Callable[[], float],
        limits: PullLimits,
        sources: KvSourceReports,
        new_secret: Callable[[], str],
    ) -> None:
        self.admission, self.sources = admission, sources
        self.on_late: Callable[[], None] = lambda: None
        self.table = LegTable()
        self.book = LoadBook()
        self.vitals = Vitals()
        self._engine, self._clock = engine, clock
        self._limits = limits
        self._last_leg = 0
        self._new_secret = new_secret

    # -- the beginning ----------------------------------------------------------------------------

    def begin(self, outbox: Outbox, m: Prefill | Start | Pool | Encode) -> None:
        """Accept the leg and give its job to the engine, or send the gateway a refusal.

        Raises InvalidRequest if another leg of the session has this key.
        """
        if self.table.find(outbox, m.key) is not None:
            raise InvalidRequest("a key must not be used twice", field="commands")
        try:
            if isinstance(m, Pool):
                self._begin_pool(outbox, m)
            elif isinstance(m, Encode):
                self._begin_encode(outbox, m)
            else:
                self._begin_answer(outbox, m)
        except InvalidRequest as exc:
            failure = Failed(0, exc.reason, exc.message, is_retryable=False)
            outbox.add_event(convert.failed(m.key, failure))

    def _begin_pool(self, outbox: Outbox, m: Pool) -> None:
        """Raises InvalidRequest."""
        asked = convert.pool_from_proto(m)
        ask = Ask(
            leg=self._last_leg + 1,
            work=Work.POOL,
            num_prompt_tokens=max(map(len, asked.inputs)),
            max_tokens=0,
            remaining_s=m.remaining_ms / 1000,
            model=m.model,
        )
        if self._admitted(outbox, m.key, ask) is None:
            return
        leg = self._without_answer(outbox, m, ask, sum(map(len, asked.inputs)))
        assert isinstance(self._engine, PoolingEngine), "admission refuses such legs elsewhere"
        self._engine.pool(
            PoolJob(
                leg=leg.number,
                request_id=m.request_id,
                task=asked.task,
                inputs=asked.inputs,
                first_lengths=asked.first_lengths,
                num_dimensions=m.num_dimensions,
                use_activation=m.use_activation if m.HasField("use_activation") else None,
                cache_salt=m.cache_salt,
                traceparent=m.traceparent,
            )
        )

    def _begin_encode(self, outbox: Outbox, m: Encode) -> None:
        """Raises InvalidRequest."""
        images = convert.encode_from_proto(m)
        ask = Ask(
            leg=self._last_leg + 1,
            work=Work.ENCODE,
            num_prompt_tokens=max(image.num_tokens for image in images),
            max_tokens=0,
            remaining_s=m.remaining_ms / 1000,
            model=m.model,
            has_images=True,
        )
        if self._admitted(outbox, m.key, ask) is None:
            return
        leg = self._without_answer(outbox, m, ask, sum(image.num_tokens for image in images))
        assert isinstance(self._engine, EncoderEngine), "admission refuses such legs elsewhere"
        self._engine.encode(
            EncodeJob(leg.number, m.request_id, images, m.cache_salt, m.traceparent)
        )

    def _without_answer(self, outbox: Outbox, m: Pool | Encode, ask: Ask, num_tokens: int) -> Leg:
        """Begin an accepted leg of pooling or encoding, which draws no tokens."""
        self.book.admitted(ask.leg, m.request_id, 0, self._clock())
        trace_id = m.traceparent[3:35]
        leg = Leg(ask.leg, outbox, m.key, ask.work, m.request_id, num_tokens, trace_id)
        leg.began_at = self._clock()
        name = names.SPAN_POOLING if ask.work is Work.POOL else names.SPAN_ENCODE
        leg.span = spans.start(name, m.traceparent, m.request_id, m.attempt)
        self.table.add(leg)
        outbox.add_accepted(leg.key)
        return leg

    def embedded(self, leg: Leg, m: Embedded) -> None:
        self._engine.embedded(leg.number, convert.encoder_from_proto(m))

    def _admitted(self, outbox: Outbox, key: int, ask: Ask) -> Admitted | None:
        """Ask admission. If admission refuses, send the gateway the reason and return None."""
        decision = self.admission.admit(ask, self._clock())
        if isinstance(decision, Refused):
            self._refuse(outbox, key, decision)
            return None
        self._last_leg = ask.leg
        instruments.admissions.add(1, instruments.ACCEPTED)
        self.vitals.num_accepted += 1
        return decision

    def _begin_answer(self, outbox: Outbox, m: Prefill | Start) -> None:
        """Raises InvalidRequest."""
        parsed = convert.parse(m, self.admission.capacity)
        work, source = _work_of(m), _source_of(m)
        if self.sources.ejects(source):
            detail = "KV from its source was corrupt too often"
            self._refuse(outbox, m.key, Refused(RefusalReason.SOURCE_EJECTED, detail=detail))
            return
        ask = Ask(
            leg=self._last_leg + 1,
            work=work,
            num_prompt_tokens=len(parsed.prompt),
            max_tokens=parsed.sampling.max_tokens,
            remaining_s=m.remaining_ms / 1000,
            model_fingerprint=m.ticket.model_fingerprint if isinstance(m, Start) else None,
            model=m.model,
            adapter=parsed.adapter.digest if parsed.adapter is not None else "",
            has_images=bool(parsed.images),
        )
        decision = self._admitted(outbox, m.key, ask)
        if decision is None:
            return
        num_computed_here = 0 if work is Work.DECODE else ask.num_prompt_tokens
        self.book.admitted(ask.leg, m.request_id, num_computed_here, self._clock())
        num_tokens = ask.num_prompt_tokens + ask.max_tokens
        trace_id = m.traceparent[3:35]
        leg = Leg(ask.leg, outbox, m.key, work, m.request_id, num_tokens, trace_id, source=source)
        leg.began_at = self._clock()
        if isinstance(m, Start):
            self._start_decode(leg, m, parsed, decision.range)
        else:
            self._start_prefill(leg, m, parsed, decision.range)

    def _refuse(self, outbox: Outbox, key: int, refused: Refused) -> None:
        instruments.admissions.add(1, instruments.REFUSED[refused.reason])
        self.vitals.num_refused += 1
        outbox.add_event(convert.rejected(key, refused))
        if refused.retry_after_ms:
            outbox.wants_load = True

    def _start_prefill(
        self, leg: Leg, m: Prefill, parsed: convert.Parsed, staging: ArenaRange | None
    ) -> None:
        leg.span = spans.start(names.SPAN_PREFILL, m.traceparent, m.request_id, m.attempt)
        if staging is not None:
            leg.ticket_id = make_ticket_id(leg.number, self._new_secret())
        job = PrefillJob(
            leg=leg.number,
            request_id=m.request_id,
            attempt=m.attempt,
            prompt=parsed.prompt,
            sampling=parsed.sampling,
            ticket_id=leg.ticket_id,
            staging=staging,
            is_per_layer=m.kv_transfer == KV_TRANSFER_PER_LAYER,
            cache_salt=m.cache_salt,
            block_hashes=parsed.block_hashes,
            traceparent=m.traceparent,
            adapter=parsed.adapter,
            images=parsed.images,
            priority=parsed.priority,
            awaits_embeddings=m.awaits_embeddings,
        )
        leg.is_per_layer = job.is_per_layer and hands_on(job, self.admission.capacity.max_model_len)
        self.table.add(leg)
        if not leg.is_per_layer:  # a per-layer leg is accepted when its ticket opens
            leg.outbox.add_accepted(leg.key)
        self._engine.prefill(job)

    def _start_decode(
        self, leg: Leg, m: Start, parsed: convert.Parsed, landing: ArenaRange | None
    ) -> None:
        assert landing is not None
        num_bytes = all_bytes(
            m.ticket.model_fingerprint, m.ticket.kv_bytes, len(m.ticket.addresses)
        )
        leg.compute_s_per_byte = m.prompt_compute_ms / 1000 / max(1, num_bytes)
        leg.span = spans.start(names.SPAN_DECODE, m.traceparent, m.request_id, m.attempt)
        leg.transfer_span = spans.start(
            names.SPAN_KV_TRANSFER, m.traceparent, m.request_id, m.attempt
        )
        self.table.add(leg)
        leg.outbox.add_accepted(leg.key, _HOLD_ACCEPTED_S)
        remaining_s = m.remaining_ms / 1000
        # The deadline of an early decode includes the prefill, so `join` bounds the pull.
        if not m.awaits_first_token:
            remaining_s = min(remaining_s, self._limits.timeout_s)
        self._engine.decode(
            DecodeJob(
                leg=leg.number,
                request_id=m.request_id,
                attempt=m.attempt,
                prompt=parsed.prompt,
                first_token=None if m.awaits_first_token else m.first_token_id,
                ticket=convert.ticket_from_proto(m.ticket),
                landing=landing,
                sampling=parsed.sampling,
                deadline_s=remaining_s,
                cache_salt=m.cache_salt,
                block_hashes=parsed.block_hashes,
                traceparent=m.traceparent,
                stall_s=self._limits.stall_s,
                adapter=parsed.adapter,
                images=parsed.images,
                priority=parsed.priority,
            )
        )

    def join(self, leg: Leg, first_token: int) -> None:
        """Prefill has drawn `first_token`, so the decode may pull the rest of the KV."""
        self._engine.join(leg.number, first_token)
        leg.is_joined = True
        self._bound_pull(leg)

    def pulling(self, leg: Leg) -> None:
        """The engine has begun to pull the leg's KV.

        The gateway's limit `LEG_STALL_S` has been running since the acceptance. So if the leg had
        to wait for its turn, an event tells the gateway that the pull has begun.
        """
        leg.is_pulling = True
        self._bound_pull(leg)
        if self._clock() - leg.began_at > _HOLD_ACCEPTED_S:
            leg.outbox.add_sign(convert.kv_advanced(leg.key, KV_STAGE_PULLING))

    def _bound_pull(self, leg: Leg) -> None:
        """Start the timeout of an early decode's pull, once prefill is done and the pull has begun.

        Before that, the source must not be blamed: either its prefill still computes, or our engine
        has no room for the pull.
        """
        if leg.is_joined and leg.is_pulling and not leg.has_first and leg.overdue is None:
            loop = asyncio.get_running_loop()
            leg.overdue = loop.call_later(self._limits.timeout_s, self._on_overdue, leg)

    # -- the end ----------------------------------------------------------------------------------

    def abort(self, leg: Leg) -> None:
        """Abort a leg. Its memory is freed later, by the engine's TicketClosed or LandingFreed."""
        self._engine.abort(leg.number)
        self.forget(leg, "aborted")
        self.admission.ended(leg.number, self._clock())
        self.free_if_closed(leg)

    def _on_overdue(self, leg: Leg) -> None:
        if self.table.get(leg.number) is not leg:
            return
        self._engine.abort(leg.number)
        message = f"{PullFailure.TIMEOUT}: the KV did not arrive in time after token 1"
        reason = KvTransferFailed.default_reason
        self.fail(leg, Failed(leg.number, reason, message, cause=PullFailure.TIMEOUT))
        self.on_late()

    def fail(self, leg: Leg, failure: Failed) -> None:
        log.warning(
            "leg.failed",
            request_id=leg.request_id,
            trace_id=leg.trace_id,
            reason=failure.reason,
            detail=failure.message,
        )
        if failure.reason == KvTransferFailed.default_reason:
            instruments.transfer_failures.add(1, {names.ATTR_REASON: failure.cause})
            self.sources.failed(leg.source, failure.cause, leg.request_id)
        if failure.reason not in _OF_REQUEST:
            self.sources.on_error(failure.reason, failure.message, leg.request_id)
        leg.outbox.add_event(convert.failed(leg.key, failure))
        self.close(leg, "failed" if _is_of_instance(failure) else "refused")

    def close(self, leg: Leg, outcome: str) -> None:
        """End a leg whose last event was sent.

        A prefill that ends here in whole mode hands on no KV, so its range is freed at once.
        """
        self.forget(leg, outcome)
        now = self._clock()
        self.admission.ended(leg.number, now)
        if leg.is_per_layer:
            self.free_if_closed(leg)  # while the ticket is open, a decode may still pull
        elif leg.work is Work.PREFILL:
            self.table.close_ticket(leg.ticket_id)
            self.admission.range_freed(leg.number, now)

    def forget(self, leg: Leg, outcome: str) -> None:
        """Send no more events of this leg, and count its end."""
        self.book.ended(leg.number, self._clock())
        failure = "" if outcome == "finished" else outcome
        spans.end(leg.transfer_span, failure)
        spans.end(leg.span, failure)
        leg.span = leg.transfer_span = None
        self.in_time(leg)
        self.table.remove(leg)
        self.vitals.num_ended += 1
        self.vitals.num_failed += outcome == "failed"
        instruments.legs_ended.add(1, {names.ATTR_OUTCOME: outcome})

    @staticmethod
    def in_time(leg: Leg) -> None:
        """Stop the timeout of `_bound_pull`: the KV has come or is not needed any more."""
        if leg.overdue is not None:
            leg.overdue.cancel()
            leg.overdue = None

    def free_if_closed(self, leg: Leg) -> None:
        """Free the range of a per-layer ticket that closed while its prefill still computed."""
        if leg.is_per_layer and not self.table.is_ticket_open(leg.ticket_id):
            self.admission.range_freed(leg.number, self._clock())

    def ended_unheard(self, number: int) -> None:
        """Free the range of a prefill that the engine ended before the engine saw the abort.

        In this case the engine sends no TicketClosed.
        """
        leg = self.table.with_ticket(number)
        if leg is not None and not leg.is_per_layer:
            self.table.close_ticket(leg.ticket_id)
            self.admission.range_freed(number, self._clock())

    def check_invariants(self) -> None:
        self.admission.check_invariants()
        self.sources.check_invariants()


# Reasons of failures that this request would have on any instance.
_OF_REQUEST: Final = (ConstraintUnsatisfiable.default_reason, ImageUnusable.default_reason)
# Reasons of failures that depend on the instance's model and adapters. The instance works well, and
# another one may serve the request.
_OF_MODEL: Final = (AdapterUnusable.default_reason, ImageMisfit.default_reason)


def _is_of_instance(failure: Failed) -> bool:
    """Whether a failure is a sign of a bad instance. Clients can cause all other failures."""
    return failure.is_retryable and failure.reason not in _OF_MODEL


def _source_of(m: Prefill | Start) -> KvSource | None:
    return KvSource(m.ticket.instance_id, m.ticket.incarnation) if isinstance(m, Start) else None


def _work_of(m: Prefill | Start) -> Work:
    if isinstance(m, Start):
        return Work.DECODE
    return Work.LOCAL if m.is_local else Work.PREFILL
