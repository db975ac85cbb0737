"""Fetches KV blocks from the host pools of other instances, and lends blocks to them (S76).

The KV index says which peer holds which blocks. Its answer is a hint and may be out of date. A peer
refuses a fetch that is for another incarnation (life of an instance) or another KV fingerprint.
Otherwise it serves the requested blocks up to the first one that it no longer has. Every block is
verified when it arrives.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import structlog

from pdmesh.core.kv.tier import Tier
from pdmesh.core.kv.transfer.ticket import PullFailure
from pdmesh.errors import KvTransferFailed
from pdmesh.kv.agent.types import PinnedBlocks
from pdmesh.kv.tiers.host_pool import HostPool
from pdmesh.kv.tiers.report import TierCounts, TierEvent, TierFault
from pdmesh.kv.transport.base import ByteArray

log = structlog.get_logger(__name__)

MAX_NAMES: Final = 1024  # block names in one fetch


@dataclass(frozen=True, slots=True)
class PeerHolding:
    """A peer whose host pool holds `count` blocks of a chain, from position `first` on.

    A chain is the sequence of a prompt's block names.
    """

    instance_id: str
    incarnation: int
    addresses: tuple[str, ...] = field(repr=False)  # by rank
    first: int
    count: int

    @property
    def held(self) -> int:
        """A mask of the positions in the chain whose blocks the peer holds."""
        return ((1 << self.count) - 1) << self.first


# Called with a chain and a position. Returns the peers that hold blocks from this position on.
FindHolders = Callable[[Sequence[bytes], int], Awaitable[Sequence[PeerHolding]]]


class PeerPools(Protocol):
    async def load(
        self, peer: PeerHolding, names: Sequence[bytes], targets: Sequence[ByteArray]
    ) -> Sequence[bytes]:
        """Fetch blocks into `targets`, up to the first one that the peer lacks, and verify them.

        Returns the checksums of these blocks, once no late write can reach a target. Never raises.
        The caller cancels this only when the process ends.
        """
        ...


class FetchBlocks(Protocol):
    """`KvAgent.fetch`, or its equivalent for an agent on another thread."""

    def __call__(
        self,
        address: str,
        incarnation: int,
        names: Sequence[bytes],
        targets: Sequence[ByteArray],
        *,
        deadline_s: float,
        on_freed: Callable[[], None],
        source: str = "",
    ) -> Awaitable[Sequence[bytes]]: ...


class AgentPeers:
    """Fetches blocks over the KV agent. `timeout_s` bounds one fetch.

    A fetch of corrupt bytes is reported as a fault of the peer. The instance's host (its part
    outside the engine) decides which peers to avoid.
    """

    def __init__(
        self,
        fetch: FetchBlocks,
        timeout_s: float,
        counts: TierCounts,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        self._fetch, self._timeout_s, self._counts = fetch, timeout_s, counts
        self._rank, self._num_ranks = rank, num_ranks

    async def load(
        self, peer: PeerHolding, names: Sequence[bytes], targets: Sequence[ByteArray]
    ) -> Sequence[bytes]:
        if len(peer.addresses) != self._num_ranks:
            return ()  # the peer divides its blocks among another number of ranks
        names, targets = names[:MAX_NAMES], targets[:MAX_NAMES]
        loop, freed = asyncio.get_running_loop(), asyncio.Event()

        def on_freed() -> None:
            loop.call_soon_threadsafe(freed.set)

        try:
            return await self._fetch(
                peer.addresses[self._rank],
                peer.incarnation,
                names,
                targets,
                deadline_s=self._timeout_s,
                on_freed=on_freed,
                source=peer.instance_id,
            )
        except KvTransferFailed as error:
            log.info("kv.tier.peer_failed", peer=peer.instance_id, reason=error.reason)
            if error.reason == PullFailure.CORRUPT:
                source = peer.instance_id, peer.incarnation
                what = f"bad blocks from {peer.instance_id}"
                self._counts.fault(TierFault(Tier.PEER, error.reason, what, source))
            await freed.wait()
            return ()


@dataclass(frozen=True, slots=True)
class _Lent(PinnedBlocks):
    names: Sequence[bytes] = ()


class PoolSource:
    """The agent's `BlockSource` for a host pool: peers fetch the pool's blocks through it.

    A peer's fetch does not count as a use of the block, so it does not delay the block's eviction.
    """

    def __init__(self, pool: HostPool, counts: TierCounts) -> None:
        self._pool, self._counts = pool, counts

    def open(self, names: Sequence[bytes]) -> PinnedBlocks | None:
        blocks = self._pool.pin(names)
        if not blocks:
            return None
        self._counts.add(Tier.HOST, TierEvent.LENT, len(blocks))
        views, checksums = [b.data for b in blocks], [b.checksum for b in blocks]
        return _Lent(views, checksums, [b.name for b in blocks])

    def close(self, pinned: PinnedBlocks) -> None:
        assert isinstance(pinned, _Lent)
        self._pool.unpin(pinned.names, is_use=False)
