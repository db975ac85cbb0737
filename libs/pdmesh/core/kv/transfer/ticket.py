"""The right to pull one prompt's staged KV, and why that right or a pull may end.

A prefill stages a prompt's KV in a buffer, and a decode pulls it. The ticket for this pull names
the sender's incarnation (one life of an instance) and the attempt that staged the bytes. So a pull
that is meant for an earlier incarnation or attempt is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Final

MAX_TICKET_ID: Final = 128  # bytes of utf-8


def make_ticket_id(number: int, secret: str) -> str:
    """Make the id of a ticket. A receiver that knows `secret` may pull.

    `number` is unique within the incarnation, and may be logged.
    """
    return f"{number:x}-{secret}"


def shown_ticket_id(ticket_id: str) -> str:
    """The part of a ticket id that may be logged."""
    return ticket_id.rpartition("-")[0]


@dataclass(frozen=True, slots=True)
class Ticket:
    """The right to pull one prompt's staged KV. The type mirrors `pdmesh.v1.Ticket`.

    The secret is left out of the `repr`.
    """

    ticket_id: str = field(repr=False)
    request_id: str
    attempt: int
    instance_id: str
    incarnation: int
    model_fingerprint: str
    num_tokens: int
    kv_bytes: int  # on each rank; in a pipeline, on a rank of the stage with the most layers
    addresses: tuple[str, ...] = field(repr=False)  # one per rank
    lease_ms: int


class CloseReason(StrEnum):
    """Why a ticket was closed."""

    TAKEN = "taken"
    RELEASED = "released"
    EXPIRED = "expired"
    FAILED = "failed"  # the agent ended, or could not serve the pull


class Refusal(IntEnum):
    """Why a sender does not serve a pull. The numbers are on the wire: never reuse one."""

    UNKNOWN_TICKET = 1
    WRONG_INCARNATION = 2
    WRONG_ATTEMPT = 3
    WRONG_MODEL = 4
    TICKET_CLOSED = 5
    LEASE_ENDED = 6
    BAD_RANGE = 7
    TOO_MANY_PULLS = 8
    STOPPED = 10  # the receiver asked the sender to stop
    WRONG_GROUP = 11


class PullFailure(StrEnum):
    """Why a pull failed, for `KvTransferFailed.reason`.

    A refused pull has the reason `KV_REFUSED_<refusal>` instead.
    """

    TIMEOUT = "KV_TRANSFER_TIMEOUT"
    PEER_LOST = "KV_PEER_LOST"
    CONNECT = "KV_CONNECT_FAILED"
    CORRUPT = "KV_CORRUPT"
    UNCHECKED = "KV_NOT_CHECKED"  # the bytes could not be checked
    BAD_TICKET = "KV_BAD_TICKET"
    PROTOCOL = "KV_PROTOCOL_ERROR"
    CLOSING = "KV_AGENT_CLOSING"
    BUSY = "KV_TOO_MANY_PULLS"
    # The receiver was too late: no turn came in time, or the engine did not report the pull's
    # outcome. This failure is not the source's fault.
    OVERDUE = "KV_PULL_OVERDUE"
