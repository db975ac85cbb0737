"""Handles the outputs of an instance's engine.

A leg is a request's stay on this instance. Tokens and events are added to the outbox of the leg's
session. An output that ends a leg frees the leg's slot. When the engine has released a leg's
memory, the output that says so frees the reservation. Changes of the engine's cache are published.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from pdmesh.core.instance.admission import Work
from pdmesh.core.kv.transfer.source_exclusions import KvSource
from pdmesh.engine.base import (
    AdaptersChanged,
    BlocksChanged,
    Encoded,
    Failed,
    Finished,
    KvArrived,
    KvPulling,
    KvReceived,
    LandingFreed,
    Output,
    Pooled,
    Prefilled,
    TicketClosed,
    TicketOpened,
    TiersReported,
    TokenBatch,
    Tokens,
)
from pdmesh.instance.legs import convert, instruments, spans
from pdmesh.instance.legs.leg_life import LegLife
from pdmesh.telemetry import names
from pdmesh.v1.instance_service_pb2 import KV_STAGE_ARRIVED, LogprobsDrawn, SessionEvent


class Outputs:
    """`on_blocks` receives the changes of the engine's cache.

    `on_record` is called when the instance's registry record has changed.
    """

    def __init__(
        self,
        life: LegLife,
        clock: Callable[[], float],
        on_blocks: Callable[[BlocksChanged], None],
        on_record: Callable[[], None],
    ) -> None:
        self.loaded_adapters: tuple[str, ...] = ()
        self._life, self._legs = life, life.table
        self._clock, self._on_blocks, self._on_record = clock, on_blocks, on_record

    def pass_on(self, output: Output) -> None:
        _HANDLE[type(output)](self, output)

    def _on_ticket_opened(self, output: TicketOpened) -> None:
        if (leg := self._legs.get(output.leg)) is not None:
            leg.outbox.add_event(convert.accepted(leg.key, output.ticket))

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
        life = self._life
        life.book.computed(output.leg, output.num_cached_tokens, self._clock())
        if (leg := self._legs.get(output.leg)) is None:
            if output.finish_reason is not None:
                life.ended_unheard(output.leg)
            return
        leg.outbox.add_event(convert.first_token(leg.key, output))
        leg.has_first = True
        instruments.tokens.add(1)
        if leg.work is Work.PREFILL:
            spans.end(leg.span, pdmesh__usage__cached_tokens=output.num_cached_tokens)
            leg.span = None
        if output.finish_reason is not None:
            life.close(leg, "finished")
            return
        if leg.work is Work.LOCAL:
            life.book.decodes(leg.number, self._clock())
        life.admission.computed(leg.number)
        if leg.is_per_layer and not self._legs.is_ticket_open(leg.ticket_id):
            life.forget(leg, "finished")  # the decode pulled all KV before token 1 was read here
            life.free_if_closed(leg)

    def _on_kv_pulling(self, output: KvPulling) -> None:
        if (leg := self._legs.get(output.leg)) is not None:
            self._life.pulling(leg)

    def _on_kv_arrived(self, output: KvArrived) -> None:
        if (leg := self._legs.get(output.leg)) is not None:
            self._life.in_time(leg)
            leg.has_first = True
            leg.outbox.add_sign(convert.kv_advanced(leg.key, KV_STAGE_ARRIVED))

    def _on_kv_received(self, output: KvReceived) -> None:
        if (leg := self._legs.get(output.leg)) is None:
            return
        event = convert.kv_received(
            leg.key, output.kv_bytes, output.duration_s, output.num_computed_tokens
        )
        leg.outbox.add_event(event, is_urgent=False)
        leg.has_first = True
        life = self._life
        life.book.decodes(leg.number, self._clock())
        if output.kv_bytes:  # 0: all KV was here already, so nothing was pulled from the source
            compute_s = leg.compute_s_per_byte * output.kv_bytes
            life.sources.succeeded(leg.source, output.waited_s, compute_s, leg.request_id)
        life.in_time(leg)
        life.vitals.num_pulls += 1
        life.vitals.pull_s += output.duration_s
        life.vitals.pull_bytes += output.kv_bytes
        instruments.transfer_s.record(output.duration_s)
        instruments.transfer_bytes.add(output.kv_bytes)
        instruments.computed_tokens.add(output.num_computed_tokens)
        spans.end(leg.transfer_span, pdmesh__kv__bytes=output.kv_bytes)
        leg.transfer_span = None
        life.admission.computed(leg.number)

    def _on_finished(self, output: Finished) -> None:
        if (leg := self._legs.get(output.leg)) is None:
            return
        leg.outbox.add_event(convert.finished(leg.key, output.finish_reason))
        self._life.close(leg, "finished")

    def _on_pooled(self, output: Pooled) -> None:
        if (leg := self._legs.get(output.leg)) is None:
            return
        leg.outbox.add_values(convert.pooled(leg.key, output))
        self._life.close(leg, "finished")

    def _on_encoded(self, output: Encoded) -> None:
        if (leg := self._legs.get(output.leg)) is None:
            return
        instruments.images_encoded.add(output.num_computed)
        leg.outbox.add_event(convert.encoded(leg.key, output))
        self._life.close(leg, "finished")

    def _on_failed(self, output: Failed) -> None:
        if (leg := self._legs.get(output.leg)) is None:
            self._life.ended_unheard(output.leg)
        else:
            self._life.fail(leg, output)

    def _on_ticket_closed(self, output: TicketClosed) -> None:
        if (leg := self._legs.close_ticket(output.ticket_id)) is None:
            return
        instruments.tickets_closed.add(1, {names.ATTR_REASON: output.reason})
        if self._legs.get(leg.number) is leg:
            if leg.is_per_layer and not leg.has_first:
                return  # the leg still computes; its end frees the slot and the range
            self._life.forget(leg, "finished")
        self._life.admission.range_freed(leg.number, self._clock())

    def _on_landing_freed(self, output: LandingFreed) -> None:
        self._life.admission.range_freed(output.leg, self._clock())

    def _on_blocks_changed(self, output: BlocksChanged) -> None:
        self._on_blocks(output)

    def _on_adapters_changed(self, output: AdaptersChanged) -> None:
        self.loaded_adapters = output.loaded
        instruments.adapter_changes.add(1, {names.ATTR_EVENT: output.event})
        if output.event == "loaded":
            instruments.adapter_load_s.record(output.seconds)
        self._on_record()

    def _on_tiers_reported(self, output: TiersReported) -> None:
        instruments.count_tiers(output.report)
        for fault in output.report.faults:
            self._life.sources.on_error(
                fault.reason, f"{fault.tier.value} tier: {fault.message}", ""
            )
            if fault.source is not None:
                self._life.sources.failed(KvSource(*fault.source), fault.reason, "")


# The type is Any because each function takes only the output class that is its key.
_HANDLE: Final[dict[type, Callable[[Outputs, Any], None]]] = {
    TokenBatch: Outputs._on_token_batch,
    Tokens: Outputs._on_tokens,
    TicketOpened: Outputs._on_ticket_opened,
    Prefilled: Outputs._on_prefilled,
    KvPulling: Outputs._on_kv_pulling,
    KvArrived: Outputs._on_kv_arrived,
    KvReceived: Outputs._on_kv_received,
    Finished: Outputs._on_finished,
    Pooled: Outputs._on_pooled,
    Encoded: Outputs._on_encoded,
    Failed: Outputs._on_failed,
    TicketClosed: Outputs._on_ticket_closed,
    LandingFreed: Outputs._on_landing_freed,
    BlocksChanged: Outputs._on_blocks_changed,
    TiersReported: Outputs._on_tiers_reported,
    AdaptersChanged: Outputs._on_adapters_changed,
}
