"""The worker's half of the hand-over, which passes a prompt's KV from prefill to decode.

`HandoffWorker` carries out each step's plan with the rank's KV agent. The agent stages KV and pulls
it over UCX, on its own thread. To stage KV is to gather it from vLLM's blocks into memory that
decodes pull from. The host is the part of the instance outside the engine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import structlog

from pdmesh import failpoints
from pdmesh.core.instance.arena import ArenaRange
from pdmesh.core.kv.layout.cache_groups import CacheGroups
from pdmesh.core.kv.layout.compatibility import KvFormat
from pdmesh.core.kv.layout.rank_heads import heads_of
from pdmesh.core.kv.layout.rank_place import RankPlace
from pdmesh.core.kv.transfer.gpu_or_host import KvMemory, KvPath, NoSuchPath, decide_path
from pdmesh.engine.vllm.connector.kv_facts import KvFacts
from pdmesh.engine.vllm.connector.refusal import CannotMoveKv, HasNoKvPath
from pdmesh.engine.vllm.connector.scheduler.handoff import StepPlan
from pdmesh.engine.vllm.connector.worker.cache_choice import paged_caches
from pdmesh.engine.vllm.connector.worker.cache_layout import CacheLayout, read_layout, with_windows
from pdmesh.engine.vllm.connector.worker.group_caches import GroupCaches
from pdmesh.engine.vllm.connector.worker.incoming import IncomingKv
from pdmesh.engine.vllm.connector.worker.outgoing import Outgoing
from pdmesh.engine.vllm.connector.worker.peer_checks import PeerProber
from pdmesh.engine.vllm.connector.worker.piece_pulls import Share
from pdmesh.engine.vllm.connector.worker.tier_worker import RankBlocks, TierWorker
from pdmesh.engine.vllm.connector.worker.work_signs import WorkSigns
from pdmesh.engine.vllm.messages import (
    Connections,
    Disconnect,
    Join,
    Open,
    ProbePeer,
    RankHello,
    RankLandingFreed,
    Release,
    TierOrder,
    ToWorker,
    WorkerControl,
)
from pdmesh.engine.vllm.model.fingerprint import COMPUTATION_CHARS, digest
from pdmesh.errors import KvTransferFailed
from pdmesh.kv.agent.agent import KvAgent
from pdmesh.kv.agent.arena_memory import AgentMemory, ArenaMemory, HostArena
from pdmesh.kv.agent.thread import AgentThread
from pdmesh.kv.agent.types import (
    AgentEvent,
    AgentIdentity,
    AgentLandingFreed,
    AgentTicketClosed,
)
from pdmesh.kv.device.probe import path_facts
from pdmesh.kv.transport.ucx import UcxTransport

if TYPE_CHECKING:
    import torch

log = structlog.get_logger(__name__)


class HandoffWorker:
    """`outgoing` and `incoming` are None until `start`, and remain None if no KV is handed over."""

    def __init__(
        self,
        config: Mapping[str, Any],
        place: RankPlace,
        num_blocks: int,
        groups: CacheGroups,
        group_of: Mapping[str, int],
    ) -> None:
        """`group_of` has the cache group of each layer, by vLLM's name.

        A cache group is a set of layers that need the same share of a text.
        """
        failpoints.arm(config["failpoints"])
        self._config, self._place, self._rank = config, place, place.rank
        self._num_blocks, self._groups, self._group_of = num_blocks, groups, group_of
        self._fingerprint = ""
        self._layers: dict[str, int] = {}  # by vLLM's name, in order of computation
        self._agent: AgentThread | None = None
        self._path: KvPath | None = None  # None if no KV leaves or arrives
        self.outgoing: Outgoing | None = None
        self._lost: set[str] = set()  # requests that fail with the next results
        self._is_empty_step = False  # the step computes nothing
        self.incoming: IncomingKv | None = None
        self.tiers: TierWorker | None = None
        self._prober: PeerProber | None = None
        self._control = WorkerControl(config["control_path"], self._on_message, _exit)
        self.signs = WorkSigns(place.rank, self._control.send)

    def start(self, kv_caches: Mapping[str, torch.Tensor], facts: KvFacts) -> None:
        """Open the KV agent on the allocated cache, and send a RankHello to the host.

        `kv_caches` are in the order in which the model computes the layers. Raises CannotMoveKv.
        """
        layout = self._read_layout(kv_caches, facts)
        group_of = [self._group(name) for name in kv_caches]
        windows = [self._groups.windows[group] for group in group_of]
        if self._place.stages and any(windows):
            raise CannotMoveKv(
                "the mesh moves no KV of a pipeline whose layers have windows or states: set "
                "pipeline_parallel_size to 1"
            )
        block_size = self._groups.block_size
        kind = KvFormat(
            digest((self._config["computation"], facts.computed))[:COMPUTATION_CHARS],
            facts.dtype,
            facts.scales,
            block_size,
            with_windows(layout.block, windows),
            num_ranks=self._place.num_beside if layout.is_opaque else 0,
            num_heads=0 if layout.is_opaque else facts.num_heads,
            stages=self._place.stages,
        )
        self._fingerprint = str(kind)
        caches = GroupCaches(
            paged_caches(kv_caches, layout, self._num_blocks),
            self._groups,
            group_of,
            self._fingerprint,
        )
        self._layers = {name: number for number, name in enumerate(kv_caches)}
        if tiers := self._config["tiers"]:
            self.tiers = TierWorker(
                tiers,
                caches,
                RankBlocks(self._fingerprint, block_size, self._rank, self._place.num_ranks),
                self._control.send,
                _die,
            )
        self._device = next(iter(kv_caches.values())).device
        address, send = self._open_agent(), self._control.send
        if self._agent is not None:
            self.outgoing = Outgoing(self._rank, caches, self._agent, send)
            share = Share(facts.num_heads, self._place)
            self.incoming = IncomingKv(share, caches, self._agent, self._config["max_pulls"], send)
            self._prober = PeerProber(share, self._agent, send)
        self._control.send(
            RankHello(
                self._rank,
                self._place.num_ranks,
                os.getpid(),
                address,
                self._fingerprint,
                self._num_blocks,
                caches.num_layers * caches.block_bytes,
                caches.num_layers,
                tuple(windows) if any(windows) else (),
                len(self._groups),
                self._groups.first_full,
                str(self._path or ""),
            )
        )

    def _read_layout(self, kv_caches: Mapping[str, torch.Tensor], facts: KvFacts) -> CacheLayout:
        """Raises CannotMoveKv."""
        place = self._place
        if place.stages and len(kv_caches) != place.stages[place.stage]:
            raise CannotMoveKv(
                f"{len(kv_caches)} of the {place.stages[place.stage]} layers on stage "
                f"{place.stage} keep KV of their own, and the mesh moves KV of pipelines only "
                "where all layers do: set pipeline_parallel_size to 1"
            )
        try:
            mine = heads_of(facts.num_heads, place.num_beside, place.rank_in_stage)
            return read_layout(
                kv_caches,
                self._num_blocks,
                mine.count,
                is_packed=self._config["device"] == "cpu",
                kernels=facts.backends,
                is_stage=bool(place.stages),
            )
        except ValueError as error:
            raise CannotMoveKv(str(error)) from error

    def _decide_path(self) -> KvPath:
        """Decide whether the arenas, the memory for transfers, are in host memory or on the device.

        Raises HasNoKvPath if the machine lacks the path that the settings ask for.
        """
        config = self._config
        num_bytes = config["staging_bytes"] + config["landing_bytes"]
        try:
            facts = path_facts(self._device, config["kv_host"], num_bytes)
            path = decide_path(
                KvMemory(config["kv_memory"]), facts, requires_rdma=config["requires_rdma"]
            )
        except (NoSuchPath, KvTransferFailed) as error:
            raise HasNoKvPath(str(error)) from error
        log.info("kv.path", memory=path.memory.value, because=path.reason)
        return path

    @property
    def _is_on_device(self) -> bool:
        return self._path is not None and self._path.memory is KvMemory.DEVICE

    def _group(self, layer_name: str) -> int:
        """The layer's cache group.

        Raises CannotMoveKv for a layer without a group, because such a layer uses another layer's
        cache.
        """
        if len(self._groups) == 1:
            return 0
        if layer_name not in self._group_of:
            raise CannotMoveKv(f"{layer_name} has no cache group of its own")
        return self._group_of[layer_name]

    def _open_agent(self) -> str:
        config = self._config
        lends = self.tiers is not None and config["tiers"]["uses_peers"]
        if not (config["staging_bytes"] or config["landing_bytes"] or lends):
            return ""  # a fusion instance does both phases: no KV leaves or arrives
        self._path = self._decide_path()
        identity = AgentIdentity(
            config["instance_id"],
            config["incarnation"],
            self._fingerprint,
            self._rank,
            config["group_id"],
        )
        agent = self._agent = AgentThread(lambda: self._make_agent(identity), die=_die)
        address = agent.start()
        if self.tiers is not None and lends:
            self.tiers.ask_peers(agent)
        return address

    def _make_agent(self, identity: AgentIdentity) -> KvAgent:
        return KvAgent(
            UcxTransport(self._config["kv_host"], reaches_gpu=self._is_on_device),
            identity,
            AgentMemory(
                self._arena("staging_bytes"),
                self._arena("landing_bytes"),
                self.tiers.source() if self.tiers is not None else None,
            ),
            self._on_agent_event,
            on_peers=lambda num_open: self._control.send(Connections(self._rank, num_open)),
        )

    def _arena(self, size: str) -> ArenaMemory:
        if self._is_on_device:
            from pdmesh.kv.device.arena import DeviceArena

            return DeviceArena(self._config[size], self._device)
        arena = HostArena(self._config[size])
        if self._config["device"] != "cpu" and arena.size:
            # this import needs Triton, which only a machine with a GPU has
            from pdmesh.kv.device.copies import lock_pages

            lock_pages(arena.view(ArenaRange(0, arena.size)))
        return arena

    # -- a step, on vLLM's thread ------------------------------------------------------------------

    def begin(self, plan: StepPlan, num_tokens: int) -> None:
        """Carry out what the plan orders before the forward, which computes `num_tokens`."""
        self.signs.step(num_tokens)
        self._is_empty_step = num_tokens == 0
        self._lost.update(plan.lost)
        if self.tiers is not None:
            self.tiers.begin()
        if (outgoing := self.outgoing) is not None:
            for ticket_id in plan.dropped_tickets:
                outgoing.drop(ticket_id)
        if (incoming := self.incoming) is None:
            return
        for leg in plan.dropped_legs:
            incoming.forget(leg)
            self._control.send(RankLandingFreed(self._rank, leg))
        for load in plan.cancelled:
            incoming.cancel(load)
        for load in (*plan.loads, *plan.takes):
            incoming.pull(load)
        for entered in plan.entered:
            incoming.entered(entered)

    def put_layer(self, plan: StepPlan, layer_name: str) -> None:
        """Within the forward, gather a layer of the prompts that are handed on per layer."""
        self.signs.layer()
        if plan.parts and self.outgoing is not None:
            self.outgoing.put_layer(plan.parts, self._layers[layer_name])

    def stage(self, plan: StepPlan) -> None:
        """Stage the step's prompts, after the forward."""
        if self.outgoing is not None:
            self.outgoing.end_step(plan.parts)
            self.outgoing.stage(plan.stores)

    def take_results(self) -> tuple[set[str], set[str]]:
        """vLLM's ids of the requests whose KV has arrived, and of the requests that must fail."""
        lost, self._lost = self._lost, set()
        if self.incoming is None:
            return set(), lost
        received, failed = self.incoming.take_results(self._is_empty_step and not lost)
        return received, failed | lost

    def take_first_tokens(self) -> dict[int, int]:
        """Token 1 of decodes that began before the token was known, by leg.

        A leg is the number of a request's stay on this instance.
        """
        return self.incoming.take_first_tokens() if self.incoming is not None else {}

    def close(self) -> None:
        if self.tiers is not None:
            self.tiers.close()
        if self._agent is not None:
            self._agent.close()
        self._control.close()

    # -- other threads ----------------------------------------------------------------------------

    def _on_message(self, message: ToWorker) -> None:
        match message:
            case Release():
                if self.outgoing is not None:
                    self.outgoing.release(message.ticket_id)
            case Open():
                if self.outgoing is not None:
                    self.outgoing.open(message)
            case Join():
                if self.incoming is not None:
                    self.incoming.join(message.leg, message.token_id)
            case ProbePeer() | Disconnect():
                if self._prober is not None:
                    self._prober.handle(message)
            case _ if isinstance(message, TierOrder) and self.tiers is not None:
                self.tiers.handle(message)

    def _on_agent_event(self, event: AgentEvent) -> None:
        match event:
            case AgentTicketClosed():
                assert self.outgoing is not None
                self.outgoing.closed(event.ticket_id, event.reason)
            case AgentLandingFreed():
                assert self.incoming is not None
                self.incoming.landing_freed(event.offset)


def _die(error: BaseException) -> None:
    """End the process, because the host relies on the part that failed. The host notices this."""
    log.critical("vllm.worker.died", exc_info=error)
    os._exit(1)


def _exit() -> None:
    """Exit at once, because the host is gone.

    This process has no state to save, and vLLM may wait a long time for a dead parent.
    """
    os._exit(1)
