"""A gateway's report of a request that has ended."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

_ID: Final = re.compile(r"[0-9a-f]{24}")  # the common part of `req-...`, `chatcmpl-...`, `msg_...`


@dataclass(frozen=True, slots=True)
class InstanceLoss:
    """The request lost an instance `at_ms` milliseconds after the request arrived.

    If no instance is to blame, `instance_ids` is empty. `num_tokens` counts the answer's tokens so
    far. `choice` is the answer's number in a call with several answers.
    """

    at_ms: float
    instance_ids: tuple[str, ...]
    cause: str
    num_tokens: int = 0
    choice: int = 0


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """Times are milliseconds since the request's arrival. 0 means that the request did not reach
    that stage.

    Two fields are durations. `decode_queue_ms` is the time from token 1 until a decode accepted the
    request. `kv_transfer_ms` is the time that the KV transfer took.

    `is_by_client` means that the request failed because of its client's input.
    """

    request_id: str
    scenario: str
    outcome: str  # completed, failed, cancelled
    gateway_id: str = ""
    trace_id: str = ""
    model: str = ""
    operation: str = ""
    reason: str = ""
    is_by_client: bool = False
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_completion_tokens: int = 0
    num_rejections: int = 0
    prefill_id: str = ""
    decode_id: str = ""
    pooling_id: str = ""
    queue_ms: float = 0.0
    ttft_ms: float = 0.0
    e2e_ms: float = 0.0
    kv_transfer_ms: float = 0.0
    decode_queue_ms: float = 0.0
    losses: tuple[InstanceLoss, ...] = ()


def key_of(request_id: str) -> str:
    """The common part of all ids of one request, both those for clients and those for operators."""
    found = _ID.search(request_id)
    return found.group() if found else request_id
