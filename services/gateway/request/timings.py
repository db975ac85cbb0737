"""When a choice reached each stage, for its log line, metrics, event and spans."""

from __future__ import annotations

from dataclasses import dataclass

from pdmesh.core.request.events import (
    Event,
    FirstToken,
    LegAccepted,
    LegKvReceived,
    PlanFailed,
    PlanReceived,
)


@dataclass(slots=True)
class Timings:
    """When each stage was first reached, in monotonic seconds; 0 if it was not.

    `handed_over` and `decode_accepted` belong to the first hand-over whose KV arrived. Until KV
    arrives, they belong to the last attempt. `kv_received` is when KV last arrived.
    """

    submitted: float = 0.0
    asked: float = 0.0  # the plan was asked for; the prompt's blocks were named before
    planned: float = 0.0
    accepted: float = 0.0  # by a prefill
    first_token: float = 0.0
    handed_over: float = 0.0  # token 1 of the prefill whose KV the decode took
    decode_accepted: float = 0.0
    kv_received: float = 0.0
    ended: float = 0.0
    kv_transfer_us: int = 0  # of the last KV; set before `note` gets its LegKvReceived
    _decode_key: int = 0  # of the last leg that was offered to a decode

    def decode_offered(self, key: int) -> None:
        self._decode_key = key
        if not self.kv_received:
            self.decode_accepted = 0.0

    def note(self, event: Event, now: float) -> None:
        match event:
            case FirstToken():
                self.first_token = self.first_token or now
                self.accepted = self.accepted or now  # a fast prefill reports both at once
                if not self.kv_received:
                    self.handed_over = now
            case LegAccepted(key) if key != self._decode_key:
                self.accepted = self.accepted or now
            case LegAccepted() if not self.kv_received:
                self.decode_accepted = now
            case PlanReceived() | PlanFailed():
                self.planned = self.planned or now
            case LegKvReceived():
                if not self.kv_received:  # a fast decode reports this together with its acceptance
                    began_at = now - self.kv_transfer_us / 1e6
                    self.decode_accepted = self.decode_accepted or began_at
                self.kv_received = now

    @property
    def decode_queue_s(self) -> float:
        """From token 1 until a decode accepted; 0 if none did, or one did before token 1."""
        return max(0.0, self.decode_accepted - self.handed_over) if self.handed_over else 0.0
