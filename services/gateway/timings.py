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
    decode_accepted: float = 0.0  # 0 too if a fast decode said that and KvReceived at once
    kv_received: float = 0.0
    ended: float = 0.0
    kv_transfer_us: int = 0

    def note(self, event: Event, now: float) -> None:
        kind = type(event)
        if kind is FirstToken:
            self.first_token = self.first_token or now
            self.accepted = self.accepted or now  # a fast prefill says both at once
        elif kind is LegAccepted:
            if not self.accepted:
                self.accepted = now
            else:
                self.decode_accepted = self.decode_accepted or now
        elif kind is PlanReceived or kind is PlanFailed:
            self.planned = self.planned or now
        elif kind is KvReceived:
            self.kv_received = now

    @property
    def decode_queue_s(self) -> float:
        """From token 1 until a decode took the request; 0 if there was none, or it had taken it before."""
        taken = self.decode_accepted or self.kv_received - self.kv_transfer_us / 1e6
        return max(0.0, taken - self.first_token) if self.first_token else 0.0
