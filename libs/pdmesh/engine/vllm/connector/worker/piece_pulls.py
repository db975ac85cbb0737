"""Pulls one prompt's KV from one or several ranks of its sender, as one pull (S57).

A ticket is the right to pull the KV. The pull writes into a landing, which is a range of the
decode's memory. If both sides have the same number of ranks, the pull is one piece: all of the
ticket's KV, from the rank of the same number. Otherwise each piece has some heads of one source
rank, and has its own part of the landing. The pull is over when the last piece has ended, with or
without success. Only then does nothing write into the landing any more. In a pipeline, a rank pulls
only from the sender's ranks of the same stage.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, replace
from functools import partial

from pdmesh.core.instance.arena import ArenaRange
from pdmesh.core.kv.layout.rank_heads import heads_of, num_takers, pieces
from pdmesh.core.kv.layout.rank_place import RankPlace
from pdmesh.core.kv.transfer.ticket import PullFailure, Ticket
from pdmesh.errors import KvTransferFailed
from pdmesh.kv.agent.thread import AgentThread
from pdmesh.kv.agent.types import PullResult
from pdmesh.kv.transport.base import KvBytes


@dataclass(frozen=True, slots=True)
class PiecePull:
    """One piece of a pull.

    The source rank's heads in `heads` become this rank's heads in `here`. Both are (first, number),
    and None means all heads. A piece with a `count` of 0 brings no bytes: it only tells the source
    rank that its KV is not needed. `num_takers` ranks pull from the source rank.
    """

    source_rank: int
    landing: ArenaRange
    num_bytes: int
    heads: tuple[int, int] | None
    here: tuple[int, int] | None
    count: int
    num_takers: int


@dataclass(frozen=True, slots=True)
class Share:
    """Which of the model's KV heads this rank holds, in its stage's layers."""

    num_heads: int  # of the model
    place: RankPlace

    def is_like(self, ticket: Ticket) -> bool:
        """Whether the ticket's sender has the same number of ranks."""
        return len(ticket.addresses) == self.place.num_ranks

    def sources(self, num_sources: int) -> tuple[int, ...]:
        """The ranks that this rank pulls from, if the sender has `num_sources` ranks.

        Raises ValueError like `pieces`.
        """
        place = self.place
        if num_sources == place.num_ranks:
            return (place.rank,)
        first = place.first_of(num_sources)
        found = pieces(
            self.num_heads, place.num_beside_of(num_sources), place.num_beside, place.rank_in_stage
        )
        return tuple(sorted({first + piece.source_rank for piece in found}))

    def pieces(self, ticket: Ticket, landing: ArenaRange, num_bytes: int) -> tuple[PiecePull, ...]:
        """The pieces to pull for a prompt: from which rank, and to which part of `landing`.

        This rank takes `num_bytes` of the prompt. Raises ValueError if the ranks cannot share the
        heads equally, although `Jobs.decode` should have refused such a ticket.
        """
        place, num_heads = self.place, self.num_heads
        num_beside, rank = place.num_beside, place.rank_in_stage
        if self.is_like(ticket):
            count = max(1, num_heads // num_beside)
            return (PiecePull(place.rank, landing, num_bytes, None, None, count, 1),)
        num_sources = place.num_beside_of(len(ticket.addresses))
        first = place.first_of(len(ticket.addresses))
        head_bytes = num_bytes // heads_of(num_heads, num_beside, rank).count
        at, pulls = landing.offset, []
        for piece in pieces(num_heads, num_sources, num_beside, rank):
            size = piece.count * head_bytes
            pulls.append(
                PiecePull(
                    first + piece.source_rank,
                    ArenaRange(at, size),
                    size,
                    (piece.source_head, piece.count) if piece.count else None,
                    (piece.head, piece.count),
                    piece.count,
                    num_takers(num_heads, num_sources, num_beside, piece.source_rank),
                )
            )
            at += size or 1  # an empty piece needs its own offset: ranges are freed by offset
        return tuple(pulls)


def pull_pieces(
    agent: AgentThread,
    ticket: Ticket,
    wanted: Sequence[PiecePull],
    *,
    leg: int,
    deadline_s: float,
    stall_s: float,
    first_block: int,
    num_blocks: int,
    on_silent: Callable[[], None] = lambda: None,
    on_range: Callable[[PiecePull, int, KvBytes], None] | None = None,
) -> TogetherPull:
    """Pull all pieces at once. The pull begins with the prompt's block `first_block`.

    `on_range` is as in `KvAgent.pull`, with offsets within the piece.
    """

    def pull(piece: PiecePull) -> Future[PullResult]:
        landed = None if on_range is None else partial(on_range, piece)
        return agent.pull(
            ticket if first_block else _of_stage(ticket, piece),
            piece.landing,
            deadline_s=deadline_s,
            stall_s=stall_s,
            first_block=first_block if piece.count else num_blocks,
            on_range=landed,
            source_rank=piece.source_rank,
            heads=piece.heads,
            num_takers=piece.num_takers,
            leg=leg,
            on_silent=on_silent,
        )

    return TogetherPull([(piece, pull(piece)) for piece in wanted])


def _of_stage(ticket: Ticket, piece: PiecePull) -> Ticket:
    """The ticket with the byte count of this rank's stage, instead of the largest stage's."""
    if piece.heads is not None or piece.num_bytes == ticket.kv_bytes:
        return ticket
    return replace(ticket, kv_bytes=piece.num_bytes)


class TogetherPull:
    """Several pulls that count as one.

    The callback runs on the thread that ends the last of the pulls.
    """

    def __init__(self, pulls: Sequence[tuple[PiecePull, Future[PullResult]]]) -> None:
        self._pulls = list(pulls)
        self._lock = threading.Lock()
        self._num_open = len(self._pulls)
        self._on_done: Callable[[], None] = lambda: None

    def start(self, on_done: Callable[[], None]) -> None:
        """Call `on_done` once, when all pulls have ended. The pulls are under way already."""
        self._on_done = on_done
        for _, pull in self._pulls:
            pull.add_done_callback(self._on_ended)

    def cancel(self) -> None:
        for _, pull in self._pulls:
            pull.cancel()

    def error(self) -> BaseException | None:
        """The first failure, or None if all pieces arrived. Valid only after all pulls have ended.

        A cancellation is returned only if there is no other failure.
        """
        errors = [e for piece, pull in self._pulls if (e := self._error(piece, pull)) is not None]
        told = [e for e in errors if not isinstance(e, CancelledError)]
        return next(iter(told or errors), None)

    @property
    def arrived(self) -> list[PiecePull]:
        """Pieces whose landing the caller owns.

        The KV agent frees the landings of the other pieces later.
        """
        return [p for p, pull in self._pulls if not pull.cancelled() and not pull.exception()]

    @staticmethod
    def _error(piece: PiecePull, pull: Future[PullResult]) -> BaseException | None:
        if pull.cancelled():
            return CancelledError()
        if (error := pull.exception()) is not None:
            return error
        if (came := pull.result().num_bytes) != piece.num_bytes:
            message = f"{came} bytes arrived, not {piece.num_bytes}"
            return KvTransferFailed(message, reason=PullFailure.PROTOCOL)
        return None

    def _on_ended(self, pull: Future[PullResult]) -> None:
        if pull.cancelled() or pull.exception() is not None:
            self.cancel()  # the other pulls are useless now
        with self._lock:
            self._num_open -= 1
            is_over = not self._num_open
        if is_over:
            self._on_done()
