"""One prompt's KV pulled from several ranks of its sender, as one pull (S57).

With as many ranks here as there it is one piece: the whole ticket, from the rank's like. Else each piece is some
heads of one source rank, lands in a part of the landing range of its own, and the pull is over when the last has ended, whatever
became of it: only then does nobody write into the range.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any, Protocol

from pdmesh.core.arena import ArenaRange
from pdmesh.core.reslice import heads_of, num_takers, pieces
from pdmesh.core.ticket import PullFailure, Ticket
from pdmesh.errors import KvTransferFailed


@dataclass(frozen=True, slots=True)
class PiecePull:
    """`heads` None is all of the source's. `head` and `count` are where they belong here; count 0 brings nothing."""

    source_rank: int
    landing: ArenaRange
    num_bytes: int
    heads: tuple[int, int] | None
    head: int
    count: int
    num_takers: int


def piece_pulls(
    ticket: Ticket,
    landing: ArenaRange,
    *,
    num_bytes: int,
    num_heads: int,
    num_ranks: int,
    rank: int,
) -> tuple[PiecePull, ...]:
    """What `rank` pulls for a prompt of which it holds `num_bytes`. `num_heads` are the model's kv heads.

    Raises KvTransferFailed for a ticket of a number of ranks that the heads do not divide over.
    """
    num_sources = len(ticket.addresses)
    if num_sources == num_ranks:
        mine = 1 if num_heads < num_ranks else num_heads // num_ranks
        return (PiecePull(rank, landing, num_bytes, None, 0, mine, 1),)
    try:
        found = pieces(num_heads, num_sources, num_ranks, rank)
    except ValueError as error:
        raise KvTransferFailed(str(error), reason=PullFailure.PROTOCOL) from error
    head_bytes = num_bytes // heads_of(num_heads, num_ranks, rank).count
    at, pulls = landing.offset, []
    for piece in found:
        size = piece.count * head_bytes
        # A piece without bytes has a place of its own too: what is freed is named by its offset.
        pulls.append(
            PiecePull(
                piece.source_rank,
                ArenaRange(at, size),
                size,
                (piece.source_head, piece.count) if piece.count else None,
                piece.head,
                piece.count,
                num_takers(num_heads, num_sources, num_ranks, piece.source_rank),
            )
        )
        at += size or 1
    return tuple(pulls)


class Pulled(Protocol):
    num_bytes: int


class TogetherPull:
    """Several pulls with one end. Callbacks come from the thread that ends the last of them."""

    def __init__(
        self, pulls: Sequence[tuple[PiecePull, Future[Any]]], is_take: bool = False
    ) -> None:
        """`is_take`: nothing is expected but the sender's word."""
        self._pulls, self._is_take = list(pulls), is_take
        self._lock = threading.Lock()
        self._num_open = len(self._pulls)
        self._on_done: Callable[[], None] = lambda: None

    def start(self, on_done: Callable[[], None]) -> None:
        """Call back once, when all have ended."""
        self._on_done = on_done
        for _, pull in self._pulls:
            pull.add_done_callback(self._on_ended)

    def cancel(self) -> None:
        for _, pull in self._pulls:
            pull.cancel()

    def error(self) -> BaseException | None:
        """The first failure that is no cancellation; else a cancellation; None if all bytes came. After the end only."""
        errors = [e for piece, pull in self._pulls if (e := self._error(piece, pull)) is not None]
        told = [e for e in errors if not isinstance(e, CancelledError)]
        return next(iter(told or errors), None)

    @property
    def arrived(self) -> list[PiecePull]:
        """Pieces whose landing is the caller's; of the others the agent says when it is free."""
        return [p for p, pull in self._pulls if not pull.cancelled() and not pull.exception()]

    def _error(self, piece: PiecePull, pull: Future[Any]) -> BaseException | None:
        if pull.cancelled():
            return CancelledError()
        if (error := pull.exception()) is not None:
            return error
        expected = 0 if self._is_take else piece.num_bytes
        if pull.result().num_bytes != expected:
            message = f"{pull.result().num_bytes} bytes came, not {expected}"
            return KvTransferFailed(message, reason=PullFailure.PROTOCOL)
        return None

    def _on_ended(self, pull: Future[Any]) -> None:
        if pull.cancelled() or pull.exception() is not None:
            self.cancel()  # the others would be of no use
        with self._lock:
            self._num_open -= 1
            is_over = not self._num_open
        if is_over:
            self._on_done()
