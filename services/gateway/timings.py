"""When a choice reached each stage: what its log line, metrics, event and spans are made of."""

from __future__ import annotations

from dataclasses import dataclass

from pdmesh.core.request_types import (
    Event,
    FirstToken,
    KvReceived,
    LegAccepted,
    PlanFailed,
    PlanReceived,
)


@dataclass(slots=True)
class Timings:
    """Monotonic seconds, of the first time it happened (KV: the last); 0 where it did not."""

    submitted: float = 0.0
    planned: float = 0.0
    accepted: float = 0.0  # by a prefill
    first_token: float = 0.0
    kv_received: float = 0.0
    ended: float = 0.0
    kv_transfer_us: int = 0

    def note(self, event: Event, now: float) -> None:
        kind = type(event)
        if kind is FirstToken:
            self.first_token = self.first_token or now
            self.accepted = self.accepted or now  # a fast prefill says both at once
        elif kind is LegAccepted:
            if not self.first_token:
                self.accepted = self.accepted or now
        elif kind is PlanReceived or kind is PlanFailed:
            self.planned = self.planned or now
        elif kind is KvReceived:
            self.kv_received = now
