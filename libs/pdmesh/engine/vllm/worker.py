"""The worker's half of the hand-off: carries out each step's plan with the rank's KV agent.

The agent runs on its own thread; vLLM's blocks are touched by the step's thread alone. Pulls land in the
agent's arena and are scattered between two steps, into blocks that vLLM holds for the waiting request
until it has been told of them. So an aborted or failed pull never writes into blocks that are somebody else's.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Mapping
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pdmesh import failpoints
from pdmesh.core.arena import ArenaRange
from pdmesh.core.kv_format import KvFormat
from pdmesh.core.kv_layout import KvLayout
from pdmesh.core.reslice import heads_of
from pdmesh.engine.vllm.cache_layout import read_layout
from pdmesh.engine.vllm.caches import PagedCaches, layout_of, paged_caches
from pdmesh.engine.vllm.handoff import Load, StepPlan, Store
from pdmesh.engine.vllm.kv_facts import KvFacts
from pdmesh.engine.vllm.messages import (
    Hello,
    LandingClear,
    PullFailed,
    Received,
    Release,
    Staged,
    StageFailed,
    TicketEnded,
    ToWorker,
    WorkerControl,
)
from pdmesh.engine.vllm.tier_worker import TierWorker
from pdmesh.errors import KvTransferFailed
from pdmesh.kv import agent as kv
from pdmesh.kv.agent_thread import AgentThread
from pdmesh.kv.arena_memory import HostArena
from pdmesh.kv.ucx import UcxTransport

if TYPE_CHECKING:
    import torch

MAX_EARLY_RELEASES = 1024  # tickets released before they were staged; more are left to their lease


@dataclass(frozen=True, slots=True)
class _Arrived:
    kv_bytes: int
    duration_s: float


class HandoffWorker:
    def __init__(
        self, config: Mapping[str, Any], rank: int, num_ranks: int, num_blocks: int
    ) -> None:
        failpoints.arm(config["failpoints"])
        self._config, self._rank, self._num_ranks = config, rank, num_ranks
        self._num_blocks = num_blocks
        self._caches: PagedCaches | None = None
        self._fingerprint = ""
        self._agent: AgentThread | None = None
        self._staging = threading.Lock()  # orders a release and the staging of its ticket
        self._staged: set[str] = set()
        self._early_releases: OrderedDict[str, None] = OrderedDict()
        self._landings: dict[int, int] = {}  # offset -> leg
        self._pulls: dict[str, Future[Any]] = {}
        self._cancelled: set[str] = set()  # keys in `_pulls`
        self._done: deque[tuple[Load, float, Future[Any]]] = deque()
        self._arrived: dict[int, _Arrived] = {}
        self.tiers: TierWorker | None = None
        self._control = WorkerControl(config["control_path"], self._on_message, _exit)

    def start(self, kv_caches: Mapping[str, torch.Tensor], facts: KvFacts) -> None:
        """Open the agent over the allocated cache and greet the host."""
        is_opaque = self._config["device"] == "cpu"
        mine = heads_of(facts.num_heads, self._num_ranks, self._rank)
        layout = read_layout(kv_caches, self._num_blocks, mine.count, is_opaque=is_opaque)
        caches = self._caches = paged_caches(kv_caches, layout, self._num_blocks)
        kind = KvFormat(
            self._config["computation"],
            facts.dtype,
            facts.scales,
            self._config["block_size"],
            layout.block,
            num_ranks=self._num_ranks if layout.is_opaque else 0,
            num_heads=0 if layout.is_opaque else facts.num_heads,
        )
        self._fingerprint = str(kind)
        if tiers := self._config["tiers"]:
            self.tiers = TierWorker(
                tiers,
                caches,
                self._fingerprint,
                self._config["block_size"],
                self._rank,
                self._num_ranks,
                self._control.send,
            )
        self._control.send(
            Hello(
                self._rank,
                self._num_ranks,
                os.getpid(),
                self._open_agent(),
                self._fingerprint,
                self._num_blocks,
                caches.num_layers * caches.block_bytes,
                caches.num_layers,
            )
        )

    def _open_agent(self) -> str:
        config = self._config
        lends = self.tiers is not None and config["tiers"]["uses_peers"]
        if not (config["staging_bytes"] or config["landing_bytes"] or lends):
            return ""  # fusion: no KV leaves or comes
        identity = kv.AgentIdentity(
            config["instance_id"], config["incarnation"], self._fingerprint, self._rank
        )
        agent = self._agent = AgentThread(lambda: self._make_agent(identity))
        address = agent.start()
        if self.tiers is not None and lends:
            self.tiers.ask_peers(agent)
        return address

    def _make_agent(self, identity: kv.AgentIdentity) -> kv.KvAgent:
        return kv.KvAgent(
            UcxTransport(self._config["kv_host"], self._config["kv_advertise_host"]),
            identity,
            staging_bytes=self._config["staging_bytes"],
            landing_bytes=self._config["landing_bytes"],
            on_event=self._on_agent_event,
            blocks=self.tiers.source() if self.tiers is not None else None,
            staging_arena=self._arena("staging_bytes"),
            landing_arena=self._arena("landing_bytes"),
        )

    def _arena(self, size: str) -> HostArena:
        arena = HostArena(self._config[size])
        if self._config["device"] != "cpu" and arena.size:
            from pdmesh.kv.device_copies import lock_pages  # Triton, where a GPU is

            lock_pages(arena.view(ArenaRange(0, arena.size)))
        return arena

    # -- a step, on vLLM's thread -------------------------------------------------------------------

    def begin(self, plan: StepPlan) -> None:
        """Drops, loads and entries of the step's plan."""
        for ticket_id in plan.dropped_tickets:
            self._early_releases.pop(ticket_id, None)
            self._control.send(TicketEnded(self._rank, ticket_id, "released"))
        for leg in plan.dropped_legs:
            self._control.send(LandingClear(self._rank, leg))
        for load in plan.cancelled:
            self._cancel(load)
        for load in plan.loads:
            self._pull(load)
        for load in plan.takes:
            self._pull(load)
        for entered in plan.entered:
            arrived = self._arrived.pop(entered.leg, _Arrived(0, 0.0))
            self._control.send(
                Received(
                    self._rank,
                    entered.leg,
                    arrived.kv_bytes,
                    arrived.duration_s,
                    entered.num_computed_tokens,
                )
            )

    def stage(self, plan: StepPlan) -> None:
        """Gather the prompts completed in this step, whose blocks may be reused after it."""
        for store in plan.stores:
            self._stage(store)

    def _stage(self, store: Store) -> None:
        agent, caches = self._agent, self._caches
        assert agent is not None
        assert caches is not None
        layout = layout_of(caches, len(store.block_ids), self._fingerprint)
        try:
            out = agent.staging(store.staging)[: layout.total_bytes]
            caches.gather(store.block_ids, out, lambda: self._serve(store, layout))
        except (IndexError, ValueError) as error:  # the host reserved too little
            self._stage_failed(store.ticket_id, error)

    def _serve(self, store: Store, layout: KvLayout) -> None:
        """The bytes are in place; the host may have lost interest meanwhile."""
        agent = self._agent
        assert agent is not None
        with self._staging:
            if self._early_releases.pop(store.ticket_id, store) is None:
                self._control.send(TicketEnded(self._rank, store.ticket_id, "released"))
                return
            self._staged.add(store.ticket_id)
            staged = agent.stage(
                store.ticket_id,
                store.request_id,
                store.attempt,
                store.staging,
                layout,
                store.lease_s,
            )
        staged.add_done_callback(lambda done: self._on_staged(store.ticket_id, done))

    def _on_staged(self, ticket_id: str, staged: Future[None]) -> None:
        if (error := staged.exception()) is not None:
            self._staged.discard(ticket_id)
            self._stage_failed(ticket_id, error)
            return
        failpoints.hit("prefill.staged")
        self._control.send(Staged(self._rank, ticket_id))

    def _stage_failed(self, ticket_id: str, error: BaseException) -> None:
        self._control.send(StageFailed(self._rank, ticket_id, str(error)))
        self._control.send(TicketEnded(self._rank, ticket_id, "failed"))

    def take_results(self) -> tuple[set[str], set[str]]:
        """Scatter what has landed. Returns the keys of loads that arrived, and of those that failed."""
        received: set[str] = set()
        failed: set[str] = set()
        while self._done:
            load, started, pull = self._done.popleft()
            del self._pulls[load.key]
            if self._scatter(load, started, pull):
                received.add(load.key)
            else:
                failed.add(load.key)
            self._cancelled.discard(load.key)
        return received, failed

    def _scatter(self, load: Load, started: float, pull: Future[Any]) -> bool:
        assert self._agent is not None
        assert self._caches is not None
        try:
            pull.result(timeout=0)
        except CancelledError:
            return False  # the leg was aborted; the agent says when its landing is free
        except KvTransferFailed as error:
            self._control.send(PullFailed(self._rank, load.leg, error.default_reason, _why(error)))
            return False  # likewise
        if load.key in self._cancelled:
            self._clear(load.landing.offset)
            return False
        caches = self._caches
        num_bytes = len(load.block_ids) * caches.num_layers * caches.block_bytes
        landed = self._agent.landing(load.landing)[:num_bytes]
        if failpoints.hit("decode.pulled") == "zero-kv":
            landed[:] = 0
        self._arrived[load.leg] = _Arrived(num_bytes, time.monotonic() - started)
        caches.scatter(landed, load.block_ids, lambda: self._clear(load.landing.offset))
        return True

    def close(self) -> None:
        if self.tiers is not None:
            self.tiers.close()
        if self._agent is not None:
            self._agent.close()
        self._control.close()

    # -- pulls ------------------------------------------------------------------------------------

    def _pull(self, load: Load) -> None:
        assert self._agent is not None, "this instance has no landing arena"
        started = time.monotonic()
        self._landings[load.landing.offset] = load.leg
        pull = self._agent.pull(
            load.ticket,
            load.landing,
            deadline_s=max(0.0, load.deadline - started),
            first_block=load.num_local_blocks,
        )
        if (
            not load.block_ids
        ):  # a take: nothing lands, nobody waits, and there may be no further step
            pull.add_done_callback(lambda _: self._clear(load.landing.offset))
            return
        self._pulls[load.key] = pull
        pull.add_done_callback(lambda done: self._done.append((load, started, done)))

    def _cancel(self, load: Load) -> None:
        self._arrived.pop(load.leg, None)
        if (pull := self._pulls.get(load.key)) is not None:
            self._cancelled.add(load.key)
            pull.cancel()

    def _clear(self, offset: int) -> None:
        """The landing range at `offset` is free; said once, whoever learns it first."""
        leg = self._landings.pop(offset, None)
        if leg is not None:
            self._control.send(LandingClear(self._rank, leg))

    # -- other threads ----------------------------------------------------------------------------

    def _on_message(self, message: ToWorker) -> None:
        if not isinstance(message, Release):
            if self.tiers is not None:
                self.tiers.handle(message)
            return
        with self._staging:
            if message.ticket_id in self._staged:
                assert self._agent is not None
                self._agent.release(message.ticket_id)
                return
            self._early_releases[message.ticket_id] = None
            if len(self._early_releases) > MAX_EARLY_RELEASES:
                self._early_releases.popitem(last=False)

    def _on_agent_event(self, event: kv.AgentEvent) -> None:
        match event:
            case kv.TicketClosed():
                self._staged.discard(event.ticket_id)
                self._control.send(TicketEnded(self._rank, event.ticket_id, event.reason))
            case kv.LandingFreed():
                self._clear(event.offset)


def _why(error: KvTransferFailed) -> str:
    return f"{error.reason}: {error.message}"


def _exit() -> None:
    """The host is gone. Nothing here is worth keeping, and vLLM may wait for a dead parent for long."""
    os._exit(1)
