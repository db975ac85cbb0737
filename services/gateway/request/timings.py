"""Notes when a choice reached each stage, for the log line, metrics, event and spans of its call.

A choice is one answer of a call. A prefill instance computes the prompt and draws token 1. Then it
hands the choice over to a decode instance, which pulls the KV.
"""

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
    """The monotonic time at which each stage was first reached. 0 if it was not reached.

    A choice may be handed over several times. `handed_over` and `decode_accepted` are the times of
    the first hand-over whose KV arrived. Until KV arrives, they are the times of the last attempt.
    `kv_received` is the time at which KV last arrived.
    """

    submitted: float = 0.0
    asked: float = 0.0  # the master was asked for a plan, after the prompt's blocks were named
    planned: float = 0.0
    accepted: float = 0.0  # a prefill accepted the choice
    first_token: float = 0.0
    handed_over: float = 0.0  # token 1 came from the prefill whose KV the decode pulled
    decode_accepted: float = 0.0
    kv_received: float = 0.0
    ended: float = 0.0
    kv_transfer_us: int = 0  # of the last KV transfer; set before `note` gets LegKvReceived
    _decode_key: int = 0  # the key of the last leg (stay on an instance) offered to a decode

    def decode_offered(self, key: int) -> None:
        self._decode_key = key
        if not self.kv_received:
            self.decode_accepted = 0.0

    def note(self, event: Event, now: float) -> None:
        match event:
            case FirstToken():
                self.first_token = self.first_token or now
                self.accepted = self.accepted or now  # a fast prefill may omit LegAccepted
                if not self.kv_received:
                    self.handed_over = now
            case LegAccepted(key) if key != self._decode_key:
                self.accepted = self.accepted or now
            case LegAccepted() if not self.kv_received:
                self.decode_accepted = now
            case PlanReceived() | PlanFailed():
                self.planned = self.planned or now
            case LegKvReceived():
                if not self.kv_received:  # a fast decode may omit LegAccepted
                    began_at = now - self.kv_transfer_us / 1e6
                    self.decode_accepted = self.decode_accepted or began_at
                self.kv_received = now

    @property
    def decode_queue_s(self) -> float:
        """Seconds from token 1 until a decode accepted the choice.

        0 if no decode accepted it, or if one did so before token 1.
        """
        return max(0.0, self.decode_accepted - self.handed_over) if self.handed_over else 0.0
