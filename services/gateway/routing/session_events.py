"""Turns an instance's events (protobuf) into events of the request core, `core.request`."""

from __future__ import annotations

from typing import Final

from pdmesh import errors
from pdmesh.core.request.events import (
    Event,
    FinishReason,
    FirstToken,
    KvAdvanced,
    KvStage,
    LegAccepted,
    LegFailed,
    LegFinished,
    LegKvReceived,
    LegRejected,
    TicketHeld,
)
from pdmesh.errors import EngineFailed
from pdmesh.v1.common_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP, Ticket
from pdmesh.v1.instance_service_pb2 import (
    KV_STAGE_ARRIVED,
    KV_STAGE_PULLING,
    REJECT_REASON_DRAINING,
    REJECT_REASON_SOURCE_EJECTED,
    REJECT_REASON_TOO_LONG,
    REJECT_REASON_WRONG_MODEL,
    REJECT_REASON_WRONG_ROLE,
    Accepted,
    Failed,
    Rejected,
    SessionEvent,
)
from pdmesh.v1.instance_service_pb2 import FirstToken as FirstTokenProto

_FINAL_REJECTS: Final = frozenset(
    {
        REJECT_REASON_DRAINING,
        REJECT_REASON_SOURCE_EJECTED,
        REJECT_REASON_WRONG_MODEL,
        REJECT_REASON_WRONG_ROLE,
    }
)
_FINISH: Final[dict[int, FinishReason]] = {
    FINISH_REASON_STOP: "stop",
    FINISH_REASON_LENGTH: "length",
}
_STAGES: Final = {KV_STAGE_PULLING: KvStage.PULLING, KV_STAGE_ARRIVED: KvStage.ARRIVED}


def from_proto(event: SessionEvent, kind: str) -> Event | None:
    """The core's event, or None if the core needs none. `kind` is `event.WhichOneof("event")`."""
    key = event.key
    match kind:
        case "accepted":
            return _accepted(key, event.accepted)
        case "rejected":
            return _rejected(key, event.rejected)
        case "first_token":
            return _first_token(key, event.first_token)
        case "kv_advanced":
            stage = _STAGES.get(event.kv_advanced.stage)
            return KvAdvanced(key, stage) if stage is not None else None
        case "kv_received":
            return LegKvReceived(key)
        case "finished":
            return LegFinished(key, _FINISH.get(event.finished.finish_reason, "stop"))
        case "pooled" | "encoded":
            # The core's event has no result: the pooled message contains the vectors, and the
            # embeddings of images stay at the encoder.
            return LegFinished(key, "stop")
        case "failed":
            return _failed(key, event.failed)
    return None


def _accepted(key: int, accepted: Accepted) -> LegAccepted:
    return LegAccepted(key, _held(accepted.ticket) if accepted.HasField("ticket") else None)


def _held(ticket: Ticket) -> TicketHeld:
    return TicketHeld(ticket.ticket_id, ticket.lease_ms / 1000, ticket)


def _rejected(key: int, rejected: Rejected) -> LegRejected:
    reason = rejected.reason
    return LegRejected(
        key,
        retry_after_s=rejected.retry_after_ms / 1000,
        is_final=reason in _FINAL_REJECTS,
        is_too_long=reason == REJECT_REASON_TOO_LONG,
        detail=rejected.detail,
    )


def _first_token(key: int, first: FirstTokenProto) -> FirstToken:
    ticket = _held(first.ticket) if first.HasField("ticket") else None
    finish = _FINISH.get(first.finish_reason)
    return FirstToken(key, first.token_id, finish, ticket, first.num_cached_tokens)


def _failed(key: int, failed: Failed) -> LegFailed:
    """Keep the reason, but not the instance's text, which only the instance's log contains."""
    kind = errors.BY_REASON.get(failed.reason, EngineFailed)
    error = kind("the instance failed this request", reason=failed.reason or None)
    return LegFailed(key, error, failed.is_retryable)
