"""Block-free transfer as in the product.

KV agents run on their own threads. KV is gathered on the engine's thread and scattered on the
agent's. Mode `whole` does the steps of the P/D-Serve paper one after the other: gather, one range
on the wire, scatter. Mode `chunked` does the same as a whole-model hand-over of the product: the
transfer begins when all of the KV is staged, and each chunk is scattered as it arrives. With mode
`layers`, each layer is announced as soon as it is gathered.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from loadtests.kv_bench import cases
from loadtests.kv_bench.cases import Command, PagedCache
from pdmesh.core.instance.arena import ArenaRange
from pdmesh.core.kv.layout.buffer_layout import KvLayout
from pdmesh.core.kv.transfer.pull_parts import CHUNK_BYTES
from pdmesh.core.kv.transfer.ticket import Ticket
from pdmesh.kv.agent.agent import KvAgent
from pdmesh.kv.agent.arena_memory import host_memory
from pdmesh.kv.agent.thread import AgentThread
from pdmesh.kv.agent.types import AgentEvent, AgentIdentity, AgentTicketClosed
from pdmesh.kv.transport.base import ByteArray
from pdmesh.kv.transport.ucx import UcxTransport

_LEASE_S = 60.0
_DEADLINE_S = 60.0
_UNCUT = 1 << 40
BlockIds = npt.NDArray[np.intp]


@dataclass(slots=True)
class Times:
    """Points in time and busy seconds of one transfer.

    Fields that end with `_s` are busy seconds. The other fields are times of `time.monotonic`,
    which is the same clock in both processes.
    """

    started: float = 0.0
    computed: float = 0.0  # when the prefill's last layer was ready
    ended: float = 0.0
    gather_s: float = 0.0
    wire_s: float = 0.0
    scatter_s: float = 0.0
    blocks_s: list[float] = field(default_factory=list)  # seconds for each block after the first


class TimedTransport(UcxTransport):
    """A transport that adds up the time for which at least one payload was on its way here."""

    def __init__(self) -> None:
        super().__init__()
        self.busy_s = 0.0
        self._num_open = 0
        self._since = 0.0

    def watch(self, request: object, on_done: Callable[[bool], None], buffer: object) -> None:
        if not isinstance(buffer, np.ndarray) or buffer.nbytes < cases.BLOCK_BYTES:
            super().watch(request, on_done, buffer)
            return
        if self._num_open == 0:
            self._since = time.monotonic()
        self._num_open += 1

        def done(is_ok: bool) -> None:
            self._num_open -= 1
            if self._num_open == 0:
                self.busy_s += time.monotonic() - self._since
            on_done(is_ok)

        super().watch(request, done, buffer)


@dataclass
class Sender:
    """The prefill's side. `tell` tells the receiver that the ticket is open.

    A ticket is the right to pull one prompt's staged KV.
    """

    largest: int
    tell: Callable[[], object]
    agent: AgentThread = field(init=False)
    _closed: threading.Event = field(init=False, default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.agent = AgentThread(
            lambda: KvAgent(
                UcxTransport(),
                AgentIdentity("prefill-0", 1, cases.FINGERPRINT),
                host_memory(self.largest, 0),
                on_event=self._on_event,
            )
        )

    def _on_event(self, event: AgentEvent) -> None:
        if isinstance(event, AgentTicketClosed):
            self._closed.set()

    def run(self, command: Command, cache: PagedCache, ids: BlockIds) -> Times:
        """Carry out a command. Returns when the receiver no longer reads the staging range."""
        self._closed.clear()
        times = self._run(command, cache, ids)
        if not self._closed.wait(_DEADLINE_S):
            raise TimeoutError(f"{command}: the ticket was not taken")
        return times

    def _run(self, command: Command, cache: PagedCache, ids: BlockIds) -> Times:
        layout = cases.layout_of(command.num_bytes, command.paging)
        staging = ArenaRange(0, layout.total_bytes)
        if command.mode in (cases.LAYERS, cases.LAYERS_COMPUTED):
            return self._by_layer(command, cache, layout, staging, ids)
        times = Times(started=time.monotonic())
        if command.mode == cases.WHOLE_COMPUTED:
            _sleep_until(
                times.started + cases.layer_compute_s(command.num_bytes) * layout.num_layers
            )
        times.computed = time.monotonic()
        cache.all_layers.gather(ids, self.agent.staging(staging))
        times.gather_s = time.monotonic() - times.computed
        self.agent.stage(
            f"t{command.serial}",
            1,
            staging,
            layout,
            _LEASE_S,
            chunk_bytes=_UNCUT
            if command.mode == cases.WHOLE
            else command.chunk_bytes or CHUNK_BYTES,
        )
        self.tell()
        return times

    def _by_layer(
        self,
        command: Command,
        cache: PagedCache,
        layout: KvLayout,
        staging: ArenaRange,
        ids: BlockIds,
    ) -> Times:
        """Announce each layer when it is gathered.

        In the mode with computation, the receiver pulls before any layer is ready, like a decode
        that is chosen when the prefill accepts the request.
        """
        ticket_id = f"t{command.serial}"
        views = np.split(self.agent.staging(staging), layout.num_layers)
        times = Times(started=time.monotonic())
        self.agent.open(
            ticket_id, 1, staging, layout, _LEASE_S, chunk_bytes=command.chunk_bytes or None
        )
        self.tell()
        is_computed = command.mode == cases.LAYERS_COMPUTED
        layer_s = cases.layer_compute_s(command.num_bytes) if is_computed else 0.0
        for i, (layer, view) in enumerate(zip(cache.by_layer, views, strict=True)):
            _sleep_until(times.started + (i + 1) * layer_s)
            times.computed = time.monotonic()
            layer.gather(ids, view)
            times.gather_s += time.monotonic() - times.computed
            self.agent.ready(ticket_id, i + 1)
        if not is_computed:
            times.computed = times.started
        return times


@dataclass
class Receiver:
    """The decode's side. `wait` returns when the sender says that the ticket is open."""

    largest: int
    wait: Callable[[], object]
    transport: TimedTransport = field(init=False)
    agent: AgentThread = field(init=False)

    def __post_init__(self) -> None:
        self.agent = AgentThread(self._make_agent)

    def _make_agent(self) -> KvAgent:
        self.transport = TimedTransport()
        return KvAgent(
            self.transport,
            AgentIdentity("decode-0", 2, cases.FINGERPRINT),
            host_memory(0, self.largest),
            on_event=lambda _: None,
        )

    def run(self, command: Command, cache: PagedCache, ids: BlockIds, address: str) -> Times:
        size = command.num_bytes
        landing = ArenaRange(0, size)
        ticket = Ticket(
            f"t{command.serial}",
            "r",
            1,
            "prefill-0",
            1,
            cases.FINGERPRINT,
            1,
            size,
            (address,),
            60_000,
        )
        before = self.transport.busy_s
        self.wait()
        if command.mode == cases.WHOLE:
            times = self._at_the_end(ticket, landing, cache, ids)
        else:
            times = self._as_it_comes(ticket, landing, cache, ids)
        times.wire_s = self.transport.busy_s - before
        return times

    def _at_the_end(
        self, ticket: Ticket, landing: ArenaRange, cache: PagedCache, ids: BlockIds
    ) -> Times:
        self.agent.pull(ticket, landing, deadline_s=_DEADLINE_S).result()
        arrived = time.monotonic()
        cache.all_layers.scatter(self.agent.landing(landing), ids)
        ended = time.monotonic()
        return Times(ended=ended, scatter_s=ended - arrived)

    def _as_it_comes(
        self, ticket: Ticket, landing: ArenaRange, cache: PagedCache, ids: BlockIds
    ) -> Times:
        """Scatter ranges on the agent's thread as soon as they are verified, as a decode does."""
        times = Times()

        def land(offset: int, data: ByteArray) -> None:
            began = time.monotonic()
            cache.all_layers.scatter_part(data, offset, ids)
            times.ended = time.monotonic()
            times.scatter_s += times.ended - began

        self.agent.pull(ticket, landing, deadline_s=_DEADLINE_S, on_range=land).result()
        return times


def _sleep_until(when: float) -> None:
    left = when - time.monotonic()
    if left > 0:
        time.sleep(left)
