"""A request that has ended, as its gateway reported it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

_ID: Final = re.compile(r"[0-9a-f]{24}")  # within `req-...`, `chatcmpl-...`, `msg_...`


@dataclass(frozen=True, slots=True)
class InstanceLoss:
    """The request lost an instance `at_ms` after it arrived. No `instance_ids`: none is to blame.

    `num_tokens`: of the answer so far; `choice`: its number in a call with several answers.
    """

    at_ms: float
    instance_ids: tuple[str, ...]
    cause: str
    num_tokens: int = 0
    choice: int = 0


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """Times are milliseconds since its arrival; 0: it did not reach that stage.

    `decode_queue_ms` and `kv_transfer_ms` are durations: from token 1 until a decode accepted, and
    of the transfer of KV.

    `is_by_client`: it failed because of its client's input.
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
    """What all ids of one request have in common, whether clients or operators see them."""
    found = _ID.search(request_id)
    return found.group() if found else request_id
