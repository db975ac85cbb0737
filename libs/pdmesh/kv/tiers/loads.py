"""Loads KV blocks from files and from peers into the host pool.

Requests that need the same block share a load. A load continues when a request stops waiting for
it, and serves the next request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import structlog

from pdmesh.core.kv.tier import Tier
from pdmesh.core.kv.tiers.load_plan import CostBook, LoadPlan
from pdmesh.kv.tiers.file_tier import FileTier
from pdmesh.kv.tiers.host_pool import HostPool
from pdmesh.kv.tiers.peers import PeerHolding, PeerPools
from pdmesh.kv.tiers.report import TierCounts, TierEvent
from pdmesh.kv.transport.base import ByteArray

log = structlog.get_logger(__name__)

FAILED_S: Final = 30.0  # after a failed load, nothing is prefetched from the peer for this time
_MAX_FAILED: Final = 256  # peers whose failures are remembered
MAX_LOADING: Final = 1024  # blocks that are loaded at the same time; the engine computes others


@dataclass(slots=True)
class BlockLoad:
    """Blocks on their way into the pool, and the number of requests that wait for them.

    Blocks that have arrived stay pinned while any request waits. Otherwise other loads might evict
    them.
    """

    names: tuple[bytes, ...]
    tier: Tier
    task: asyncio.Task[None] | None = None
    num_waiters: int = 0
    pinned: list[bytes] = field(default_factory=list)


class Loads:
    """All loads of one rank. Use it on one event loop."""

    def __init__(
        self,
        pool: HostPool,
        counts: TierCounts,
        costs: CostBook,
        clock: Callable[[], float],
        files: FileTier | None,
    ) -> None:
        self._pool, self._counts, self._costs = pool, counts, costs
        self._clock, self._files = clock, files
        self._loading: dict[bytes, BlockLoad] = {}
        self._failed_until: dict[str, float] = {}  # by peer
        self.tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        """The number of blocks that are being loaded."""
        return len(self._loading)

    def coming(self, names: Sequence[bytes]) -> Mapping[Tier, int]:
        """By tier: a mask of the positions in `names` whose blocks are being loaded from it."""
        masks: dict[Tier, int] = {}
        if self._loading:
            for i, name in enumerate(names):
                if (load := self._loading.get(name)) is not None:
                    masks[load.tier] = masks.get(load.tier, 0) | 1 << i
        return masks

    def failed_lately(self, instance_id: str) -> bool:
        """Whether the last load from this peer brought no block, at most `FAILED_S` ago."""
        return self._clock() < self._failed_until.get(instance_id, 0.0)

    def start(
        self,
        names: Sequence[bytes],
        owner: bytes,
        plan: LoadPlan,
        holdings: dict[str, PeerHolding],
        peers: PeerPools | None,
    ) -> list[BlockLoad]:
        """Start the loads that the plan needs.

        Returns these loads, and the plan's loads that are already under way. The caller counts as
        waiting for each of them until it calls `leave`.
        """
        loads: dict[int, BlockLoad] = {}
        for run in plan.runs:
            if run.tier is Tier.HOST:
                continue
            chain = names[run.first : run.first + run.count]
            for load in [self._loading[name] for name in chain if name in self._loading]:
                loads[id(load)] = load
            fresh = [name for name in chain if name not in self._loading]
            if len(self._loading) + len(fresh) > MAX_LOADING:
                self._counts.add(run.tier, TierEvent.DROPPED, len(fresh))
                continue
            for load in self._new_loads(run.tier, fresh, owner, holdings.get(run.name), peers):
                loads[id(load)] = load
        for load in loads.values():
            load.num_waiters += 1
        return list(loads.values())

    def _new_loads(
        self,
        tier: Tier,
        names: Sequence[bytes],
        owner: bytes,
        peer: PeerHolding | None,
        peers: PeerPools | None,
    ) -> list[BlockLoad]:
        if not names:
            return []
        if peer is not None and peers is not None:
            load = BlockLoad(tuple(names), tier)
            return [self._begin(load, self._from_peer(load, peers, peer, owner))]
        loads = [BlockLoad((name,), tier) for name in names]
        return [self._begin(load, self._from_file(load, owner)) for load in loads]

    def _begin(self, load: BlockLoad, work: Coroutine[Any, Any, None]) -> BlockLoad:
        for name in load.names:
            self._loading[name] = load
        load.task = asyncio.get_running_loop().create_task(work, name=f"kv-load-{load.tier.value}")
        self.tasks.add(load.task)
        load.task.add_done_callback(self.tasks.discard)
        load.task.add_done_callback(lambda _: self._ended(load))
        return load

    async def _from_file(self, load: BlockLoad, owner: bytes) -> None:
        assert self._files is not None
        (name,) = load.names
        data = self._pool.reserve(name, owner)
        if data is None:
            return  # the engine just saved it, or there is no room
        started = self._clock()
        # This task is cancelled only when the process ends. The slot then stays reserved, because a
        # thread may still write to it.
        checksum = await self._files.get(name, owner, data)
        if checksum is None:
            self._pool.abandon(name)
            return
        self._arrived(load, [(name, data, checksum)], started)

    async def _from_peer(
        self, load: BlockLoad, peers: PeerPools, peer: PeerHolding, owner: bytes
    ) -> None:
        slots = [(name, self._pool.reserve(name, owner)) for name in load.names]
        targets = [(name, data) for name, data in slots if data is not None]
        if not targets:
            return
        started = self._clock()
        names = [name for name, _ in targets]
        checksums = await peers.load(peer, names, [data for _, data in targets])
        got = len(checksums)
        for name in names[got:]:
            self._pool.abandon(name)
        self._counts.add(Tier.PEER, TierEvent.FAILED, len(names) - got)
        self._note_failure(peer.instance_id, is_failure=not got)
        arrived = [(n, data, c) for (n, data), c in zip(targets, checksums, strict=False)]
        self._arrived(load, arrived, started)

    def _note_failure(self, instance_id: str, *, is_failure: bool) -> None:
        self._failed_until.pop(instance_id, None)
        if is_failure:
            self._failed_until[instance_id] = self._clock() + FAILED_S
            if len(self._failed_until) > _MAX_FAILED:
                del self._failed_until[next(iter(self._failed_until))]

    def _arrived(
        self, load: BlockLoad, blocks: Sequence[tuple[bytes, ByteArray, bytes]], started: float
    ) -> None:
        for name, data, checksum in blocks:
            self._pool.commit(name, data, checksum, is_pinned=True)
            load.pinned.append(name)
        duration_s = self._clock() - started
        self._counts.took(load.tier, duration_s)
        self._costs.loaded(load.tier, len(blocks), duration_s)

    def _ended(self, load: BlockLoad) -> None:
        for name in load.names:
            del self._loading[name]
        assert load.task is not None
        if not load.task.cancelled() and (error := load.task.exception()) is not None:
            log.error("kv.tier.load_died", tier=load.tier.value, exc_info=error)
        self._release_waiter(load)

    def leave(self, load: BlockLoad) -> None:
        load.num_waiters -= 1
        self._release_waiter(load)

    def _release_waiter(self, load: BlockLoad) -> None:
        assert load.task is not None
        if load.num_waiters == 0 and load.task.done() and load.pinned:
            names, load.pinned = load.pinned, []
            self._pool.unpin(names, is_use=False)

    async def wait(self, loads: Sequence[BlockLoad], timeout_s: float) -> None:
        tasks = [load.task for load in loads if load.task is not None and not load.task.done()]
        if not tasks:
            return
        _, late = await asyncio.wait(tasks, timeout=max(0.0, timeout_s))
        for load in loads:
            if load.task in late:
                self._counts.add(load.tier, TierEvent.LATE, len(load.names))
