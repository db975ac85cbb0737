"""The right to pull one prompt's staged KV, and the reasons for which that right or a pull may end.

A ticket names the incarnation and the attempt that staged the bytes. So a pull meant for an earlier
incarnation or attempt is refused, not confused with the present one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Final

MAX_TICKET_ID: Final = 128  # bytes of utf-8


def make_ticket_id(number: int, secret: str) -> str:
    """`number` tells an incarnation's tickets apart and may be logged.

    `secret` gives the right to pull.
    """
    return f"{number:x}-{secret}"


def shown_ticket_id(ticket_id: str) -> str:
    """The part of a ticket id that may be logged."""
    return ticket_id.rpartition("-")[0]


@dataclass(frozen=True, slots=True)
class Ticket:
    """The right to pull one prompt's staged KV. Mirrors `pdmesh.v1.Ticket`.

    Its `repr` leaves out the secret.
    """

    ticket_id: str = field(repr=False)
    request_id: str
    attempt: int
    instance_id: str
    incarnation: int
    model_fingerprint: str
    num_tokens: int
    kv_bytes: int  # per rank; in a pipeline, on the stage with the most layers
    addresses: tuple[str, ...] = field(repr=False)  # one per rank
    lease_ms: int


class CloseReason(StrEnum):
    """Why a ticket was closed."""

    TAKEN = "taken"
    RELEASED = "released"
    EXPIRED = "expired"
    FAILED = "failed"  # the agent ended, or could not serve it


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
    """Why a pull failed, as `KvTransferFailed.reason`; if refused, it is `KV_REFUSED_<refusal>`."""

    TIMEOUT = "KV_TRANSFER_TIMEOUT"
    PEER_LOST = "KV_PEER_LOST"
    CONNECT = "KV_CONNECT_FAILED"
    CORRUPT = "KV_CORRUPT"
    UNCHECKED = "KV_NOT_CHECKED"  # the bytes could not be checked
    BAD_TICKET = "KV_BAD_TICKET"
    PROTOCOL = "KV_PROTOCOL_ERROR"
    CLOSING = "KV_AGENT_CLOSING"
    BUSY = "KV_TOO_MANY_PULLS"
    # The receiving end was too late: no turn came in time, or the engine did not report the pull's
    # outcome. That says nothing about the source.
    OVERDUE = "KV_PULL_OVERDUE"
