"""Gathers the KV of one rank's prompts into the staging arena, and keeps the prompts' tickets.

To gather KV is to copy it from vLLM's blocks to a contiguous range. The staging arena is the memory
of these ranges, from which decodes pull. A ticket is a decode's right to pull one prompt's KV, for
the length of a lease. A prompt that is handed on whole is gathered after the step that completes
it. For a prompt that is handed on per layer, the ticket is opened before the prompt is computed.
Each layer's blocks are then gathered within the forward, as soon as the layer's attention has run
(S48). Steps run on vLLM's thread, the host's orders arrive on the control socket's thread, and
tickets close on the KV agent's thread. The host is the part of the instance outside the engine.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

from pdmesh import failpoints
from pdmesh.core.instance.arena import ArenaRange
from pdmesh.core.kv.layout.buffer_layout import KvLayout
from pdmesh.core.kv.transfer.layer_order import LayerOrder
from pdmesh.engine.vllm.connector.scheduler.handoff import Store, StorePart
from pdmesh.engine.vllm.connector.worker.group_caches import GroupCaches
from pdmesh.engine.vllm.messages import (
    Open,
    RankMessage,
    RankTicketClosed,
    RankTicketOpened,
    Staged,
    StageFailed,
)
from pdmesh.kv.agent.thread import AgentThread

MAX_REMEMBERED = 1024  # tickets in `_over`, and in `_begun`; a forgotten ticket ends with its lease


class Outgoing:
    """`send` sends a message to the host.

    The host gets exactly one `RankTicketClosed` for each ticket, when nothing touches the ticket's
    staging range any more.
    """

    def __init__(
        self,
        rank: int,
        caches: GroupCaches,
        agent: AgentThread,
        send: Callable[[RankMessage], None],
    ) -> None:
        self._rank, self._caches = rank, caches
        self._agent, self._send = agent, send
        self._lock = threading.Lock()  # a ticket's release and its staging must not overlap
        self._held: set[str] = set()  # tickets that the agent knows
        self._over: OrderedDict[str, None] = (
            OrderedDict()
        )  # tickets that the host released before the agent knew them
        self._begun: OrderedDict[str, None] = (
            OrderedDict()
        )  # tickets that were opened per layer or dropped, and may not be opened again
        self._order = LayerOrder(caches.num_layers, caches.layers_with_states)

    # -- orders of the host -----------------------------------------------------------------------

    def open(self, order: Open) -> None:
        store = Store(
            order.ticket_id,
            order.attempt,
            ArenaRange(order.offset, order.length),
            order.lease_s,
            order.num_tokens,
            is_per_layer=True,
        )
        self._open(store)

    def release(self, ticket_id: str) -> None:
        with self._lock:
            if ticket_id in self._held:
                self._agent.release(ticket_id)
            elif ticket_id not in self._begun:
                _remember(self._over, ticket_id)

    # -- a step -----------------------------------------------------------------------------------

    def drop(self, ticket_id: str) -> None:
        """Close the ticket of a request that ended before its KV was staged."""
        with self._lock:
            self._over.pop(ticket_id, None)
            if ticket_id in self._held:
                self._agent.release(ticket_id)
                return
            if ticket_id in self._begun:
                return  # the ticket is closed already
            _remember(self._begun, ticket_id)
        self._send(RankTicketClosed(self._rank, ticket_id, "released"))

    def stage(self, stores: Iterable[Store]) -> None:
        """Gather the prompts that this step completed.

        Their blocks may be reused after the call.
        """
        for store in stores:
            self._stage(store)

    def put_layer(self, parts: Sequence[StorePart], layer: int) -> None:
        """The current step has computed `layer`. Gather the layers that `LayerOrder` names now."""
        self._put_layers(parts, self._order.told(layer))

    def end_step(self, parts: Sequence[StorePart]) -> None:
        """After the forward, gather the layers that were not gathered within it."""
        if not parts:
            return
        self._put_layers(parts, self._order.end_step())
        if any(part.is_last for part in parts):
            failpoints.hit("prefill.staged")

    # -- the agent's thread -----------------------------------------------------------------------

    def closed(self, ticket_id: str, reason: str) -> None:
        with self._lock:
            self._held.discard(ticket_id)
        self._send(RankTicketClosed(self._rank, ticket_id, reason))

    # -- inside -----------------------------------------------------------------------------------

    def _open(self, store: Store) -> None:
        """Open a ticket, by the host's order or in the step. The first of the two opens it.

        A ticket that was closed is not opened again.
        """
        with self._lock:
            if store.ticket_id in self._begun:
                return
            _remember(self._begun, store.ticket_id)
            self._held.add(store.ticket_id)
            opened = self._agent.open(
                store.ticket_id,
                store.attempt,
                store.staging,
                self._caches.layout(store.num_tokens),
                store.lease_s,
            )
        opened.add_done_callback(lambda done: self._on_held(store, done, RankTicketOpened))

    def _is_writable(self, part: StorePart) -> bool:
        self._open(part.store)
        with self._lock:
            return part.store.ticket_id in self._held

    def _put_layers(self, parts: Sequence[StorePart], layers: range) -> None:
        for part in parts:
            if layers and self._is_writable(part):
                for layer in layers:
                    self._put(part, layer)

    def _put(self, part: StorePart, layer: int) -> None:
        """Gather a part of a layer if there is one head, and otherwise the whole layer at the end.

        The staged bytes are ordered by head, so with several heads, a layer is gathered together
        with its last part. An opaque block, whose heads cannot be separated, counts as one head.
        """
        is_whole = self._caches.num_heads > 1
        layout = self._caches.layout(part.store.num_tokens)
        skipped = 0 if is_whole else max(0, part.first_block - layout.first_block(layer))
        ids = self._caches.of_layer(layer, part.block_ids)[skipped:]
        if not part.is_last and (is_whole or not ids):
            return
        width = self._caches.block_bytes
        start = layout.layer_start(layer) + skipped * width
        out = self._agent.staging(part.store.staging)[start : start + len(ids) * width]
        ticket_id = part.store.ticket_id
        try:
            self._caches.gather_layer(layer, ids, out, lambda: self._on_put(part, layer))
        except (IndexError, ValueError) as error:  # the host reserved too little
            self._agent.release(ticket_id)
            self._send(StageFailed(self._rank, ticket_id, str(error)))

    def _on_put(self, part: StorePart, layer: int) -> None:
        if part.is_last:
            self._agent.ready(part.store.ticket_id, layer + 1)
            failpoints.hit("prefill.layer")

    def _stage(self, store: Store) -> None:
        layout = self._caches.layout(store.num_tokens)
        try:
            out = self._agent.staging(store.staging)[: layout.total_bytes]
            self._caches.gather(store.block_ids, out, lambda: self._serve(store, layout))
        except (IndexError, ValueError) as error:  # the host reserved too little
            self._failed(store.ticket_id, error)

    def _serve(self, store: Store, layout: KvLayout) -> None:
        """Open the ticket, because the bytes are in place now.

        If the host has released the ticket before, report it as closed instead.
        """
        with self._lock:
            if self._over.pop(store.ticket_id, store) is None:
                self._send(RankTicketClosed(self._rank, store.ticket_id, "released"))
                return
            self._held.add(store.ticket_id)
            staged = self._agent.stage(
                store.ticket_id,
                store.attempt,
                store.staging,
                layout,
                store.lease_s,
            )
        staged.add_done_callback(lambda done: self._on_held(store, done, Staged))

    def _on_held(
        self, store: Store, done: Future[None], news: Callable[[int, str], RankMessage]
    ) -> None:
        if (error := done.exception()) is not None:
            with self._lock:
                self._held.discard(store.ticket_id)
            self._failed(store.ticket_id, error)
            return
        if not store.is_per_layer:
            failpoints.hit("prefill.staged")
        self._send(news(self._rank, store.ticket_id))

    def _failed(self, ticket_id: str, error: BaseException) -> None:
        self._send(StageFailed(self._rank, ticket_id, str(error)))
        self._send(RankTicketClosed(self._rank, ticket_id, "failed"))


def _remember(tickets: OrderedDict[str, None], ticket_id: str) -> None:
    tickets[ticket_id] = None
    if len(tickets) > MAX_REMEMBERED:
        tickets.popitem(last=False)
