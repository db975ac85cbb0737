"""One instance: sessions on one side, an engine on the other, admission between them.

Commands are applied at once and in order, on the event loop: a leg is refused by the admission core alone,
without asking the engine (S40). Outputs come in batches, one per engine step, and leave as one message per
session. A session that ends, for whatever reason, takes all its legs with it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import structlog

from pdmesh.core.admission import Admission, Ask, RefusalReason, Refused, Work
from pdmesh.core.kv_sources import HeldSource, KvSource, KvSources, SourceFault
from pdmesh.core.ticket import PullFailure
from pdmesh.core.vitals import Vitals
from pdmesh.engine.base import (
    ArenaRange,
    BlocksChanged,
    DecodeJob,
    Engine,
    Failed,
    Finished,
    KvReceived,
    LandingFreed,
    Prefilled,
    PrefillJob,
    TicketClosed,
    TicketOpened,
    TiersReported,
    TokenBatch,
    Tokens,
    hands_on,
)
from pdmesh.errors import InvalidRequest, KvTransferFailed
from pdmesh.instance import convert, instruments, spans
from pdmesh.instance.legs import Leg, LegTable
from pdmesh.instance.load_book import LoadBook
from pdmesh.instance.outbox import Outbox
from pdmesh.telemetry import names
from pdmesh.v1.instance_service_pb2 import (
    KV_TRANSFER_PER_LAYER,
    Command,
    Load,
    LogprobsDrawn,
    Prefill,
    SessionEvent,
    Start,
)

log = structlog.get_logger(__name__)

ENGINE_DIED: Final = "ENGINE_DIED"
SOURCE_HELD: Final = "KV_SOURCE_QUARANTINED"
SOURCE_RELEASED: Final = "KV_SOURCE_RELEASED"
_HOLD_ACCEPTED_S: Final = 0.05  # a decode's; a prefill's is not held, as gateways count T_p from it


@dataclass(frozen=True, slots=True)
class HostConfig:
    transfer_timeout_s: float = 5.0  # one pull of KV, however much of the deadline is left
    stall_s: float = 10.0  # a gateway that does not read for so long is cut off
    message_gap_s: float = 0.002  # tokens alone wait so long after a message


class InstanceHost:
    """`on_blocks`, `on_load` and `on_error` are told what is to be published, `on_record` that the record changed; they
    must not block.

    `run` passes the engine's outputs on; everything else is called by the sessions.
    """

    def __init__(
        self,
        engine: Engine,
        admission: Admission,
        clock: Callable[[], float],
        config: HostConfig = HostConfig(),
        *,
        on_blocks: Callable[[BlocksChanged], None] = lambda _: None,
        on_error: Callable[[str, str, str], None] = lambda reason, message, request_id: None,
    ) -> None:
        self.admission = admission
        self.book = LoadBook()
        self.vitals = Vitals()
        self.on_load: Callable[[], None] = lambda: None
        self.on_record: Callable[[], None] = lambda: None
        self._sources = KvSources()
        self._engine, self._clock, self._config = engine, clock, config
        self._on_blocks, self._on_error = on_blocks, on_error
        self._idle = asyncio.Event()
        self._idle.set()
        self._legs = LegTable()
        self._outboxes: dict[Outbox, None] = {}
        self._published_version = -1
        self._last_leg = 0
        self._ticket_prefix = secrets.token_hex(
            8
        )  # nobody else's tickets begin so, or can be guessed

    # -- sessions ---------------------------------------------------------------------------------

    @property
    def num_sessions(self) -> int:
        return len(self._outboxes)

    @property
    def num_running(self) -> int:
        """Legs that compute, or whose KV is on its way."""
        return self._engine.stats().num_running

    @property
    def num_pulls_queued(self) -> int:
        return int(self._engine.stats().extra.get("num_pulls_queued", 0))

    async def wait_idle(self) -> None:
        """Until no leg holds anything, staged KV included."""
        await self._idle.wait()

    @property
    def num_tickets(self) -> int:
        return self._legs.num_tickets

    def load(self) -> Load:
        admission = self.admission
        return Load(
            num_slots=admission.num_places,
            num_slots_used=admission.num_slots_used,
            num_kv_blocks_free=admission.num_blocks_free,
            is_draining=admission.is_draining,
        )

    def open(self, gateway_id: str) -> Outbox:
        config = self._config
        outbox = Outbox(gateway_id, config.stall_s, self._clock, config.message_gap_s)
        self._outboxes[outbox] = None
        outbox.set_load(self.load(), self.admission.version)
        return outbox

    def close(self, outbox: Outbox) -> None:
        """Abort every leg of the session; idempotent."""
        if outbox not in self._outboxes:
            return
        outbox.close()
        for leg in self._legs.of_session(outbox):
            self._abort(leg)
        del self._outboxes[outbox]
        self._after_changes()

    def close_all(self) -> None:
        for outbox in list(self._outboxes):
            self.close(outbox)

    def apply(self, outbox: Outbox, commands: Iterable[Command]) -> None:
        """Carry out a batch of commands. Raises InvalidRequest on what no correct gateway sends."""
        for command in commands:
            match command.WhichOneof("command"):
                case "prefill":
                    self._begin(outbox, command.prefill)
                case "start":
                    self._begin(outbox, command.start)
                case "join":
                    if leg := self._legs.find(outbox, command.join.key):
                        self._join(leg, command.join.first_token_id)
                case "abort":
                    if leg := self._legs.find(outbox, command.abort.key):
                        self._abort(leg)
                case "release":
                    if leg := self._legs.find(outbox, command.release.key):
                        self._engine.release(leg.ticket_id)
                case _:
                    raise InvalidRequest("no such command here", field="commands")
        self._after_changes()

    def drain(self, is_draining: bool) -> None:
        self.admission.drain(is_draining)
        for outbox in self._outboxes:
            outbox.wants_load = True
        self._after_changes()

    def check_invariants(self) -> None:
        self.admission.check_invariants()
        self._sources.check_invariants()
        assert all(leg.outbox in self._outboxes for leg in self._legs.all())

    # -- legs -------------------------------------------------------------------------------------

    def _begin(self, outbox: Outbox, m: Prefill | Start) -> None:
        if self._legs.find(outbox, m.key) is not None:
            raise InvalidRequest("a key is never reused", field="commands")
        try:
            parsed = convert.parse(m, self.admission.capacity)
        except InvalidRequest as exc:
            failure = Failed(0, exc.reason, exc.message, is_retryable=False)
            outbox.add_event(convert.failed(m.key, failure))
            return
        work = _work_of(m)
        ask = Ask(
            leg=self._last_leg + 1,
            work=work,
            num_prompt_tokens=len(parsed.prompt),
            max_tokens=parsed.sampling.max_tokens,
            remaining_s=m.remaining_ms / 1000,
            model_fingerprint=m.ticket.model_fingerprint if isinstance(m, Start) else None,
        )
        source = _source_of(m)
        if source is not None and self._sources.refuses(source, self._clock()):
            detail = "KV from there was corrupt too often"
            self._refuse(outbox, m.key, Refused(RefusalReason.SOURCE_QUARANTINED, detail=detail))
            return
        decision = self.admission.admit(ask, self._clock())
        if isinstance(decision, Refused):
            self._refuse(outbox, m.key, decision)
            return
        self._last_leg = ask.leg
        num_computed_here = 0 if work is Work.DECODE else ask.num_prompt_tokens
        self.book.admitted(ask.leg, m.request_id, num_computed_here, self._clock())
        instruments.admissions.add(1, instruments.ACCEPTED)
        self.vitals.num_accepted += 1
        trace_id = m.traceparent[3:35]
        leg = Leg(ask.leg, outbox, m.key, work, m.request_id, trace_id, source=source)
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
            leg.ticket_id = f"{self._ticket_prefix}{leg.number:x}"
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
        )
        leg.is_per_layer = job.is_per_layer and hands_on(job, self.admission.capacity.max_model_len)
        self._legs.add(leg)
        if not leg.is_per_layer:  # else with the ticket, once it is open
            leg.outbox.add_accepted(leg.key)
        self._engine.prefill(job)

    def _start_decode(
        self, leg: Leg, m: Start, parsed: convert.Parsed, landing: ArenaRange | None
    ) -> None:
        assert landing is not None
        leg.span = spans.start(names.SPAN_DECODE, m.traceparent, m.request_id, m.attempt)
        leg.transfer_span = spans.start(
            names.SPAN_KV_TRANSFER, m.traceparent, m.request_id, m.attempt
        )
        self._legs.add(leg)
        leg.outbox.add_accepted(leg.key, _HOLD_ACCEPTED_S)
        remaining_s = m.remaining_ms / 1000
        if (
            not m.awaits_first_token
        ):  # else it waits for prefill too: `_join` bounds what is left then
            remaining_s = min(remaining_s, self._config.transfer_timeout_s)
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
            )
        )

    def _join(self, leg: Leg, first_token: int) -> None:
        """Prefill is done, so the rest of the KV is on its way: it comes within the time of a pull, or not at all."""
        self._engine.join(leg.number, first_token)
        if not leg.has_first and leg.overdue is None:
            loop = asyncio.get_running_loop()
            timeout_s = self._config.transfer_timeout_s
            leg.overdue = loop.call_later(timeout_s, self._on_overdue, leg)

    def _on_overdue(self, leg: Leg) -> None:
        if self._legs.get(leg.number) is not leg:
            return
        self._engine.abort(leg.number)
        message = f"{PullFailure.TIMEOUT}: the KV did not arrive in time after token 1"
        reason = KvTransferFailed.default_reason
        self._on_failed(Failed(leg.number, reason, message, cause=PullFailure.TIMEOUT))
        self._after_changes()

    def _abort(self, leg: Leg) -> None:
        """The engine gives the leg's ranges back by TicketClosed or LandingFreed, perhaps later."""
        self._engine.abort(leg.number)
        self._forget(leg, "aborted")
        self.admission.ended(leg.number, self._clock())
        self._free_if_closed(leg)

    def _free_if_closed(self, leg: Leg) -> None:
        """A per-layer ticket may have closed while its prefill computed: the range was kept until now."""
        if leg.is_per_layer and not self._legs.is_ticket_open(leg.ticket_id):
            self.admission.range_freed(leg.number, self._clock())

    def _forget(self, leg: Leg, outcome: str) -> None:
        """The gateway hears no more of this leg."""
        self.book.ended(leg.number)
        failure = "" if outcome == "finished" else outcome
        spans.end(leg.transfer_span, failure)
        spans.end(leg.span, failure)
        leg.span = leg.transfer_span = None
        if leg.overdue is not None:
            leg.overdue.cancel()
            leg.overdue = None
        self._legs.remove(leg)
        self.vitals.num_ended += 1
        self.vitals.num_failed += outcome == "failed"
        instruments.legs_ended.add(1, {names.ATTR_OUTCOME: outcome})

    # -- outputs ----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Pass the engine's outputs on until it dies. Raises EngineFailed, after telling all sessions."""
        try:
            async for outputs in self._engine.outputs():
                for output in outputs:
                    _HANDLE[type(output)](self, output)
                self._after_changes()
        except Exception:
            self.fail_all(ENGINE_DIED, "the engine died")
            raise

    def _on_ticket_opened(self, output: TicketOpened) -> None:
        if (leg := self._legs.get(output.leg)) is not None:
            leg.outbox.add_event(convert.accepted(leg.key, output.ticket))

    def _on_landing_freed(self, output: LandingFreed) -> None:
        self.admission.range_freed(output.leg, self._clock())

    def _on_cache_changed(self, output: BlocksChanged | TiersReported) -> None:
        self._on_cache(output)

    def _on_token_batch(self, batch: TokenBatch) -> None:
        token_ids = batch.token_ids
        instruments.tokens.add(len(token_ids))
        instruments.batch_size.record(len(token_ids))
        for route in self._legs.route(batch.legs):
            mine = token_ids
            if len(route.positions) != len(token_ids):
                mine = [token_ids[position] for position in route.positions]
            route.outbox.add_tokens(route.keys, mine)

    def _on_tokens(self, output: Tokens) -> None:
        if (leg := self._legs.get(output.leg)) is None:
            return
        instruments.tokens.add(len(output.token_ids))
        leg.outbox.add_tokens([leg.key] * len(output.token_ids), output.token_ids)
        if output.logprobs:
            drawn = LogprobsDrawn(logprobs=map(convert.logprob_to_proto, output.logprobs))
            leg.outbox.add_event(SessionEvent(key=leg.key, logprobs_drawn=drawn), is_urgent=False)

    def _on_prefilled(self, output: Prefilled) -> None:
        self.book.computed(output.leg, output.num_cached_tokens, self._clock())
        if (leg := self._legs.get(output.leg)) is None:
            if output.finish_reason is not None:
                self._on_ended_unheard(output.leg)
            return
        leg.outbox.add_event(convert.first_token(leg.key, output))
        leg.has_first = True
        instruments.tokens.add(1)
        if leg.work is Work.PREFILL:
            spans.end(leg.span, pdmesh__usage__cached_tokens=output.num_cached_tokens)
            leg.span = None
        if output.finish_reason is not None:
            self._close(leg, "finished")
            return
        self.admission.computed(leg.number)
        if leg.is_per_layer and not self._legs.is_ticket_open(leg.ticket_id):
            self._forget(leg, "finished")  # taken before token 1 was read
            self._free_if_closed(leg)

    def _on_kv_received(self, output: KvReceived) -> None:
        if (leg := self._legs.get(output.leg)) is None:
            return
        event = convert.kv_received(
            leg.key, output.kv_bytes, output.duration_s, output.num_computed_tokens
        )
        leg.outbox.add_event(event, is_urgent=False)
        leg.has_first = True
        if leg.source is not None:
            self._sources.succeeded(leg.source)
        if leg.overdue is not None:
            leg.overdue.cancel()
            leg.overdue = None
        self.vitals.num_pulls += 1
        self.vitals.pull_s += output.duration_s
        self.vitals.pull_bytes += output.kv_bytes
        instruments.transfer_s.record(output.duration_s)
        instruments.transfer_bytes.add(output.kv_bytes)
        instruments.computed_tokens.add(output.num_computed_tokens)
        spans.end(leg.transfer_span, pdmesh__kv__bytes=output.kv_bytes)
        leg.transfer_span = None
        self.admission.computed(leg.number)

    def _on_finished(self, output: Finished) -> None:
        if (leg := self._legs.get(output.leg)) is None:
            return
        leg.outbox.add_event(convert.finished(leg.key, output.finish_reason))
        self._close(leg, "finished")

    def _on_failed(self, output: Failed) -> None:
        if (leg := self._legs.get(output.leg)) is None:
            self._on_ended_unheard(output.leg)
            return
        log.warning(
            "leg.failed",
            request_id=leg.request_id,
            trace_id=leg.trace_id,
            reason=output.reason,
            detail=output.message,
        )
        if output.reason == KvTransferFailed.default_reason:
            instruments.transfer_failures.add(1, {names.ATTR_REASON: output.cause})
            self._on_transfer_failed(leg, output.cause)
        self._on_error(output.reason, output.message, leg.request_id)
        leg.outbox.add_event(convert.failed(leg.key, output))
        self._close(leg, "failed")

    def _on_transfer_failed(self, leg: Leg, cause: str) -> None:
        if leg.source is None or not cause:
            return
        fault = self._sources.failed(leg.source, cause, self._clock())
        if fault is not None:
            where = f"{leg.source.instance_id}/{leg.source.incarnation:016x}"
            self._on_error(SOURCE_HELD, f"{where}: {fault}", leg.request_id)
            self.on_record()

    def held_sources(self) -> list[HeldSource]:
        """Whom no KV is, or had better not be, pulled from now. To be asked now and then: time ends it."""
        for over in self._sources.release_due(self._clock()):
            where = f"{over.source.instance_id}/{over.source.incarnation:016x}"
            self._on_error(SOURCE_RELEASED, f"{where}: {over.fault}", "")
        return self._sources.held()

    def num_sources_held(self, fault: SourceFault) -> int:
        return sum(h.fault is fault for h in self._sources.held())

    def _close(self, leg: Leg, outcome: str) -> None:
        """The leg's last word is said. A prefill that staged nothing has nothing to wait for."""
        self._forget(leg, outcome)
        now = self._clock()
        self.admission.ended(leg.number, now)
        if leg.is_per_layer:
            self._free_if_closed(leg)  # else TicketClosed follows: a decode may be pulling
        elif leg.work is Work.PREFILL:
            self._legs.close_ticket(leg.ticket_id)
            self.admission.range_freed(leg.number, now)

    def _on_ended_unheard(self, number: int) -> None:
        """It was aborted when it had ended already: no TicketClosed follows for a prefill's range."""
        leg = self._legs.with_ticket(number)
        if leg is not None and not leg.is_per_layer:
            self._legs.close_ticket(leg.ticket_id)
            self.admission.range_freed(number, self._clock())

    def _on_ticket_closed(self, output: TicketClosed) -> None:
        if (leg := self._legs.close_ticket(output.ticket_id)) is None:
            return
        instruments.tickets_closed.add(1, {names.ATTR_REASON: output.reason})
        if self._legs.get(leg.number) is leg:
            if leg.is_per_layer and not leg.has_first:
                return  # it computes still; its slot and range are given back at its end
            self._forget(leg, "finished")
        self.admission.range_freed(leg.number, self._clock())

    def _on_cache(self, output: BlocksChanged | TiersReported) -> None:
        if isinstance(output, BlocksChanged):
            self._on_blocks(output)
            return
        instruments.count_tiers(output.report)
        for fault in output.report.faults:
            self._on_error(fault.reason, f"{fault.tier.value} tier: {fault.message}", "")

    def fail_all(self, reason: str, message: str) -> None:
        """The engine is gone or given up, and with it everything it held: every leg fails, nothing is taken any more."""
        self._on_error(reason, message, "")
        for leg in self._legs.all():
            failure = Failed(leg.number, reason, message)
            leg.outbox.add_event(convert.failed(leg.key, failure))
            self._forget(leg, "failed")
        self.admission.drain(True)
        for outbox in self._outboxes:
            outbox.flush()
            outbox.close()

    # -- what changed -----------------------------------------------------------------------------

    def _after_changes(self) -> None:
        """Wake the writers that have something to send, and those that wait for a free slot."""
        admission = self.admission
        version, is_full = (
            admission.version,
            admission.num_slots_used >= admission.num_places,
        )
        for outbox in self._outboxes:
            is_hint = outbox.wants_load and not is_full
            if not (outbox.has_something or is_hint):
                continue
            if outbox.load_version != version:
                outbox.set_load(self.load(), version, is_urgent=is_hint)
                outbox.wants_load = is_full
            outbox.flush()
        if version != self._published_version:
            self._published_version = version
            if admission.num_slots_used == 0:
                self._idle.set()
            else:
                self._idle.clear()
            self.on_load()


def _source_of(m: Prefill | Start) -> KvSource | None:
    return KvSource(m.ticket.instance_id, m.ticket.incarnation) if isinstance(m, Start) else None


def _work_of(m: Prefill | Start) -> Work:
    if isinstance(m, Start):
        return Work.DECODE
    return Work.LOCAL if m.is_local else Work.PREFILL


# Any: each function takes the one output its key names.
_HANDLE: Final[dict[type, Callable[[InstanceHost, Any], None]]] = {
    TokenBatch: InstanceHost._on_token_batch,
    Tokens: InstanceHost._on_tokens,
    TicketOpened: InstanceHost._on_ticket_opened,
    Prefilled: InstanceHost._on_prefilled,
    KvReceived: InstanceHost._on_kv_received,
    Finished: InstanceHost._on_finished,
    Failed: InstanceHost._on_failed,
    TicketClosed: InstanceHost._on_ticket_closed,
    LandingFreed: InstanceHost._on_landing_freed,
    BlocksChanged: InstanceHost._on_cache_changed,
    TiersReported: InstanceHost._on_cache_changed,
}
