"""One rank's tiers: a pool of KV blocks in host memory, and behind it peers' pools and files.

Blocks that a request needs are first fetched into the pool, and then copied into vLLM's blocks by a
step. A lease keeps a request's fetched blocks in the pool until a step has loaded them, or until it
is certain that no step will. So the pool never overwrites a block that a step is loading. Fetches
run on their own thread and event loop. Only vLLM's thread, which runs the steps, touches vLLM's
blocks.

The host is the part of the instance outside the engine. A leg is a request's stay on this instance.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import structlog

from pdmesh import failpoints
from pdmesh.core.kv.prefix.pins import PinnedPrefix
from pdmesh.core.kv.tier import Tier
from pdmesh.core.kv.tiers.session_holds import SessionState
from pdmesh.core.kv.tiers.step_copies import PoolLoad, PoolSave, StepCopies
from pdmesh.engine.vllm.messages import (
    Fetched,
    FetchToPool,
    ForgetLease,
    Holders,
    Pin,
    PrefetchToPool,
    RankMessage,
    SessionNote,
    TierNews,
    TierOrder,
)
from pdmesh.kv.agent.thread import AgentThread
from pdmesh.kv.tiers.config import TierConfig, open_tiers
from pdmesh.kv.tiers.peers import AgentPeers, PeerHolding, PoolSource
from pdmesh.kv.tiers.report import REPORT_EVERY_S, TierEvent, TierReport
from pdmesh.kv.tiers.stack import BlockLease, TierStack
from pdmesh.kv.transport.base import ByteArray
from pdmesh.net.tasks import end, watched

if TYPE_CHECKING:
    from pdmesh.engine.vllm.connector.worker.group_caches import GroupCaches

log = structlog.get_logger(__name__)

NAMES_PER_MESSAGE: Final = 1024
_CLOSE_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class RankBlocks:
    """A rank's blocks: their model, their size, and which share of each block the rank holds."""

    model_fingerprint: str
    size: int  # tokens
    rank: int
    num_ranks: int


class TierWorker:
    def __init__(
        self,
        config: Mapping[str, Any],
        caches: GroupCaches,
        blocks: RankBlocks,
        send: Callable[[RankMessage], None],
        die: Callable[[BaseException], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`die` ends the process after an error of the tiers.

        Otherwise the host would assume a wrong state of the tiers.
        """
        self._config = TierConfig(**config)
        self._caches, self._blocks, self._send = caches, blocks, send
        self._die, self._clock = die, clock
        self._loop = asyncio.new_event_loop()
        self.stack: TierStack = open_tiers(
            self._config,
            model_fingerprint=blocks.model_fingerprint,
            block_bytes=caches.num_layers * caches.block_bytes,
            rank=blocks.rank,
            num_ranks=blocks.num_ranks,
        )
        self._lock = threading.Lock()  # guards the leases
        self._leases: dict[int, BlockLease] = {}  # by leg
        # By leg. Only the loop's thread uses these two.
        self._fetches: dict[int, asyncio.Task[None]] = {}
        self._holders: dict[int, asyncio.Future[Sequence[PeerHolding]]] = {}
        self._step_began = 0.0
        self._failed_blocks: set[int] = set()
        self._is_closing = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="kv-tiers", daemon=True)
        self._thread.start()

    def source(self) -> PoolSource:
        """The blocks that peers may fetch from this rank."""
        return PoolSource(self.stack.pool, self.stack.counts)

    def ask_peers(self, agent: AgentThread) -> None:
        """Fetch peers' blocks through this agent.

        Call it before the host's first message arrives.
        """

        async def fetch(
            *args: Any, **options: Any
        ) -> Sequence[bytes]:  # Any, because the arguments are passed on
            return await asyncio.wrap_future(agent.fetch(*args, **options))

        self.stack.peers = AgentPeers(
            fetch,
            self._config.timeout_s,
            self.stack.counts,
            self._blocks.rank,
            self._blocks.num_ranks,
        )

    # -- a step, on vLLM's thread ------------------------------------------------------------------

    def begin(self) -> None:
        """The step begins.

        The time from here, or from the end of `load`, to `save` is taken as the model's computing
        time.
        """
        self._step_began = self._clock()

    def load(self, plan: StepCopies) -> None:
        """Copy leased blocks into vLLM's blocks.

        Called before the forward, or after it if there are only leases to close.
        """
        for load in plan.loads:
            with self._lock:
                lease = self._leases.pop(load.leg, None)
            self._load(load, lease)
        if any(load.block_ids for load in plan.loads):
            self._step_began = self._clock()

    def _load(self, load: PoolLoad, lease: BlockLease | None) -> None:
        if lease is None:
            # This cannot happen as long as the host submits a request only after `Fetched`, and
            # sends `ForgetLease` only for requests that it did not submit.
            self._failed_blocks.update(*load.block_ids)
            return
        if load.block_ids:
            blocks = lease.use(load.first, len(load.block_ids[0]))
            is_spoiled = failpoints.hit("tier.loaded") == "zero-kv"
            for block, *block_ids in zip(blocks, *load.block_ids, strict=True):
                data = np.zeros_like(block.data) if is_spoiled else block.data
                self._caches.scatter_block(data, block_ids)
        lease.close()

    def save(self, plan: StepCopies) -> None:
        """Copy computed blocks into the pool, after the forward.

        The requests still hold their blocks.
        """
        if plan.saves and plan.num_tokens >= self._blocks.size:
            self._caches.wait_for_model()  # the first copy would wait, too
            duration_s = self._clock() - self._step_began
            self.stack.costs.computed(plan.num_tokens / self._blocks.size, duration_s)
        for save in plan.saves:
            self._save(save)

    def _save(self, save: PoolSave) -> None:
        pool = self.stack.pool
        first = len(save.names) - len(save.block_ids[0])
        fresh = save.names[first:]
        held = pool.held(fresh)
        for index, (name, *block_ids) in enumerate(zip(fresh, *save.block_ids, strict=True)):
            if held >> index & 1:
                continue

            def write(out: ByteArray, block_ids: Sequence[int] = block_ids) -> None:
                self._caches.gather_block(block_ids, out)

            if pool.put(name, save.owner, write):
                self.stack.stored([name], first + index)
            else:
                self.stack.counts.add(Tier.HOST, TierEvent.DROPPED)
        pool.touch(save.names)

    def take_failed_blocks(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    # -- the host's messages, on any thread --------------------------------------------------------

    def handle(self, message: TierOrder) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._handle, message)

    def _handle(self, message: TierOrder) -> None:
        match message:
            case FetchToPool():
                if message.asks_peers:
                    self._holders[message.leg] = self._loop.create_future()
                name = f"kv-tier-fetch-{message.leg}"
                self._fetches[message.leg] = watched(self._fetch(message), name, self._die)
            case Holders():
                self._told(message.leg, [PeerHolding(*holding) for holding in message.holdings])
            case ForgetLease():
                self._forget(message)
            case Pin():
                kept = [PinnedPrefix(tuple(n), owner, end) for owner, end, n in message.prefixes]
                self.stack.pin(kept)
            case PrefetchToPool():
                self._prefetch(message)
            case SessionNote():
                self._note_session(message)

    def _note_session(self, message: SessionNote) -> None:
        state = SessionState(message.state)
        self.stack.note_session(
            state, message.session, message.owner, message.names, message.hold_s
        )

    def _prefetch(self, message: PrefetchToPool) -> None:
        holder, timeout_s = PeerHolding(*message.holder), self._config.timeout_s
        self.stack.prefetch(message.names, message.owner, holder, message.chance, timeout_s)

    def _told(self, leg: int, holdings: Sequence[PeerHolding]) -> None:
        """The host has named the peers that hold the request's blocks, or the fetch has ended."""
        holders = self._holders.get(leg)
        if holders is not None and not holders.done():
            holders.set_result(holdings)

    def _forget(self, message: ForgetLease) -> None:
        if (task := self._fetches.pop(message.leg, None)) is not None:
            task.cancel()
        with self._lock:
            lease = self._leases.pop(message.leg, None)
        if lease is not None:
            lease.close()

    async def _fetch(self, ask: FetchToPool) -> None:
        holders = self._holders.get(ask.leg)

        async def find(names: Sequence[bytes], first: int) -> Sequence[PeerHolding]:
            return await holders if holders is not None else ()

        try:
            lease = await self.stack.fetch(ask.names, ask.owner, ask.first, ask.timeout_s, find)
        finally:
            self._told(ask.leg, ())
            self._holders.pop(ask.leg, None)
            self._fetches.pop(ask.leg, None)
        with self._lock:
            self._leases[ask.leg] = lease
        self._send(Fetched(self._blocks.rank, ask.leg, lease.first, lease.end))

    # -- life --------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give pending writes time to finish, within bounds. Idempotent."""
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._is_closing.set)
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:
            self._die(error)
            raise
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        reporter = watched(self._report(), "kv-tier-reports", self._die)
        await self._is_closing.wait()
        await end([reporter, *self._fetches.values()])
        await self.stack.close()

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(REPORT_EVERY_S)
            report = self.stack.report()
            if not report.is_empty:
                for news in news_of(report, self._blocks.rank):
                    self._send(news)


def news_of(report: TierReport, rank: int) -> list[TierNews]:
    """Splits the report into messages of bounded size.

    The first rank reports for all ranks. Other ranks report only failures.
    """
    faults = [(f.tier.value, f.reason, f.message, f.source) for f in report.faults]
    if rank:
        return [TierNews(rank, [], {}, {}, [], [], faults)] if faults else []
    counts = [(tier, event, n) for (tier, event), n in report.counts.items()]
    used, levels = report.bytes_used, (report.num_pinned, report.num_leased)
    news = [TierNews(rank, counts, report.seconds, used, [], [], faults, *levels)]
    news += [TierNews(rank, [], {}, {}, [], part, []) for part in _pieces(report.removed)]
    news += [TierNews(rank, [], {}, {}, part, [], []) for part in _pieces(report.stored)]
    return news


def _pieces(names: Sequence[bytes]) -> list[list[bytes]]:
    step = NAMES_PER_MESSAGE
    return [list(names[i : i + step]) for i in range(0, len(names), step)]
