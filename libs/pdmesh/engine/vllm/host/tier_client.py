"""The host's half of the tiers, which keep KV in host memory, in peers' memory and in files.

Before vLLM gets a prompt, every rank fetches the prompt's blocks from the tiers, and leases them: a
leased block stays in host memory until vLLM has loaded it. The host is the part of the instance
outside the engine. A leg is a request's stay on this instance.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import structlog

from pdmesh.core.kv.prefix.pins import PinnedPrefix
from pdmesh.core.kv.tier import Tier
from pdmesh.core.kv.tiers.owner import owner_of
from pdmesh.engine.base import BlocksChanged, Output, Prefetch, SessionHint, TiersReported
from pdmesh.engine.vllm.messages import (
    Fetched,
    FetchToPool,
    ForgetLease,
    Holders,
    Pin,
    PrefetchToPool,
    SessionNote,
    TierNews,
    TierOrder,
)
from pdmesh.kv.tiers.peers import FindHolders
from pdmesh.kv.tiers.report import TierFault, TierReport
from pdmesh.net.tasks import watched

log = structlog.get_logger(__name__)

MAX_NAMES: Final = 2048  # per prompt; further blocks are computed
GRACE_S: Final = 0.25  # time for a rank's answer to arrive


@dataclass(slots=True)
class _Asked:
    num_ranks: int
    answered: asyncio.Future[tuple[int, int]]  # first block that all ranks hold, end of the run
    held: dict[int, tuple[int, int]] = field(default_factory=dict)  # by rank

    def on_answer(self, message: Fetched) -> None:
        self.held[message.rank] = message.first, message.end
        if len(self.held) == self.num_ranks and not self.answered.done():
            firsts, ends = zip(*self.held.values(), strict=True)
            self.answered.set_result((max(firsts), min(ends)))


class TierClient:
    """`broadcast` sends to all ranks."""

    def __init__(
        self,
        broadcast: Callable[[TierOrder], None],
        num_ranks: int,
        timeout_s: float,
        find: FindHolders | None = None,
    ) -> None:
        self._broadcast, self._num_ranks, self._timeout_s = broadcast, num_ranks, timeout_s
        self._find = find
        self._asked: dict[int, _Asked] = {}

    @property
    def is_idle(self) -> bool:
        return not self._asked

    async def fetch(
        self, leg: int, names: Sequence[bytes], owner: bytes, first: int
    ) -> tuple[int, int, int] | None:
        """Let all ranks fetch blocks and lease them.

        Returns (leg, first, count) of the run of blocks that all ranks lease. None if there is no
        run.
        """
        answered = asyncio.get_running_loop().create_future()
        self._asked[leg] = _Asked(self._num_ranks, answered)
        names = list(names[:MAX_NAMES])
        asks_peers = self._find is not None
        self._broadcast(FetchToPool(leg, names, owner, first, self._timeout_s, asks_peers))
        count = 0
        finding = watched(self._tell_holders(leg, names, first), f"tier-holders-{leg}", _find_died)
        try:
            async with asyncio.timeout(self._timeout_s + GRACE_S):
                first, end = await answered
            count = max(0, end - first)
        except TimeoutError:
            pass
        finally:
            finding.cancel()
            del self._asked[leg]
            if count == 0:
                self.forget(leg)
        return (leg, first, count) if count else None

    async def _tell_holders(self, leg: int, names: Sequence[bytes], first: int) -> None:
        """Ask which peers have the blocks, while the ranks look in their own tiers."""
        if self._find is None:
            return
        holdings = await self._find(names, first)
        plain = [(h.instance_id, h.incarnation, h.addresses, h.first, h.count) for h in holdings]
        self._broadcast(Holders(leg, plain))

    def forget(self, leg: int) -> None:
        """Let all ranks end their leases for a leg that will load no blocks."""
        self._broadcast(ForgetLease(leg))

    def pin(self, prefixes: Sequence[PinnedPrefix]) -> None:
        """Let every rank pin its part of these blocks. They replace the last call's blocks."""
        self._broadcast(Pin([(p.owner, p.until, list(p.names)) for p in prefixes]))

    def prefetch(self, wanted: Prefetch) -> None:
        """Let every rank fetch its part of these blocks if the rank expects that to save time."""
        peer, names = wanted.peer, list(wanted.names)
        holder = peer.instance_id, peer.incarnation, peer.addresses, 0, len(names)
        owner = owner_of(wanted.cache_salt)
        self._broadcast(PrefetchToPool(names, owner, holder, wanted.chance))

    def note_session(self, hint: SessionHint) -> None:
        """Let every rank evict its part of a chat session's blocks later or earlier."""
        owner, names = owner_of(hint.tenant), list(hint.names)
        self._broadcast(SessionNote(hint.session, hint.state.value, names, owner, hint.hold_s))

    def on_fetched(self, message: Fetched) -> None:
        asked = self._asked.get(message.leg)
        if asked is not None:
            asked.on_answer(message)


def _find_died(error: BaseException) -> None:
    """Log that the search for holders failed. The ranks wait for its result until their timeout."""
    log.error("kv.tier.find_died", exc_info=error)


def outputs_of(news: TierNews) -> list[Output]:
    outputs: list[Output] = []
    if news.stored or news.removed:
        changed = BlocksChanged(tuple(news.stored), tuple(news.removed), tier=Tier.HOST)
        outputs.append(changed)
    levels = news.num_pinned, news.num_leased
    if news.counts or news.seconds or news.faults or levels != (None, None):
        report = TierReport(
            counts={(tier, event): count for tier, event, count in news.counts},
            seconds=news.seconds,
            bytes_used=news.bytes_used,
            faults=tuple(
                TierFault(Tier(tier), reason, what, source)
                for tier, reason, what, source in news.faults
            ),
            num_pinned=news.num_pinned,
            num_leased=news.num_leased,
        )
        outputs.append(TiersReported(report))
    return outputs
