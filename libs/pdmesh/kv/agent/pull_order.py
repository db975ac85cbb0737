"""Orders to a KV agent's receiving half: which KV to request, and where to write it.

An order is for a ticket (the right to pull one prompt's staged KV), for blocks by name, or for the
answer to a probe. `order_ticket` and `order_blocks` check an order's arguments and build the
message to the sender.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdmesh.core.kv.transfer.ticket import MAX_TICKET_ID, PullFailure, Ticket
from pdmesh.errors import KvTransferFailed
from pdmesh.kv.agent import wire
from pdmesh.kv.agent.types import OnRange
from pdmesh.kv.transport.base import KvBytes


@dataclass(slots=True)
class PullOrder:
    """A message to send, and the memory that the answer is written to.

    After a failure or a cancellation, `on_freed` is called once no late write can reach `targets`.
    """

    make_message: Callable[[int], wire.Question]  # its argument is the pull's id
    targets: Sequence[KvBytes]  # one for all bytes, or one per block, all of the same length
    min_bytes: int
    max_bytes: int
    on_freed: Callable[[], None]
    on_range: OnRange | None = None
    on_silent: Callable[[], None] = lambda: None  # called when nothing has arrived for a while
    ticket: Ticket | None = None
    source: str = ""  # the id of the sending instance

    def place(self, ranges: tuple[wire.Range, ...]) -> list[KvBytes] | None:
        """The buffers to receive the ranges into; None if the order does not cover the ranges."""
        if len(self.targets) == 1:
            whole = self.targets[0]
            return [whole[r.offset : r.offset + r.length] for r in ranges]
        size = self.targets[0].size
        if any(r.offset % size or r.length != size for r in ranges):
            return None
        indices = [r.offset // size for r in ranges]
        if indices and indices[-1] >= len(self.targets):
            return None
        return [self.targets[i] for i in indices]


def bad_ticket(what: str) -> KvTransferFailed:
    """`what` begins with the name of the ticket's bad field."""
    return KvTransferFailed(f"ticket.{what}", reason=PullFailure.BAD_TICKET)


def check_ticket(ticket: Ticket) -> None:
    """Raises KvTransferFailed (KV_BAD_TICKET) if the ticket's id is empty or too long."""
    if not 0 < len(ticket.ticket_id.encode()) <= MAX_TICKET_ID:
        raise bad_ticket(f"ticket_id: must have 1 to {MAX_TICKET_ID} bytes")


def order_ticket(
    ticket: Ticket,
    landing: KvBytes,
    fingerprint_hash: int,
    *,
    first_block: int,
    heads: tuple[int, int] | None,
    num_takers: int,
    decode: int,
    group_hash: int,
    on_range: OnRange | None,
    on_silent: Callable[[], None],
    on_freed: Callable[[], None],
) -> PullOrder:
    """Raises KvTransferFailed (KV_BAD_TICKET) if the bytes do not fit or the ticket id is bad."""
    check_ticket(ticket)
    is_whole = first_block == 0 and heads is None
    if is_whole and ticket.kv_bytes > landing.size:
        raise bad_ticket(f"kv_bytes: {ticket.kv_bytes} do not fit {landing.size}")
    first_head, num_heads = heads or (0, 0)

    def make_message(pull_id: int) -> wire.Question:
        # The sender compares our fingerprint and group with its own.
        return wire.Pull(
            pull_id,
            ticket.ticket_id,
            ticket.attempt,
            ticket.incarnation,
            fingerprint_hash,
            first_block,
            first_head,
            num_heads,
            num_takers,
            decode,
            group_hash,
        )

    # For some heads or blocks, the size depends on the sender's layout, which the ticket lacks.
    most = min(ticket.kv_bytes, landing.size)
    least = most if is_whole else 0
    return PullOrder(
        make_message,
        (landing,),
        least,
        most,
        on_freed,
        on_range,
        on_silent,
        ticket,
        ticket.instance_id,
    )


def order_blocks(
    names: Sequence[bytes],
    targets: Sequence[KvBytes],
    incarnation: int,
    fingerprint_hash: int,
    *,
    source: str,
    on_freed: Callable[[], None],
) -> PullOrder:
    """Raises ValueError for no names, too many or bad names, or targets of different sizes."""
    if not 0 < len(names) <= min(len(targets), wire.MAX_NAMES):
        raise ValueError(f"{len(names)} names for {len(targets)} targets")
    size = targets[0].size
    if any(t.size != size for t in targets) or any(len(n) != wire.NAME_BYTES for n in names):
        raise ValueError("blocks of different sizes, or a bad name")

    def make_message(pull_id: int) -> wire.Question:
        return wire.Fetch(pull_id, incarnation, fingerprint_hash, tuple(names))

    wanted = list(targets[: len(names)])
    return PullOrder(make_message, wanted, 0, size * len(names), on_freed, source=source)
