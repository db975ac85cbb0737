"""Sums up, from ended requests, how much KV each prefill handed to each decode in the last
minute.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from pdmesh.core.history.ended_request import EndedRequest

WINDOW_S: Final = 60.0
_SLOT_S: Final = 5.0
_MAX_PAIRS: Final = 4096  # in one slot of time; further pairs are not counted


@dataclass(slots=True)
class Flow:
    num_requests: int = 0
    num_tokens: int = 0  # the tokens of the prompts whose KV was transferred
    transfer_ms: float = 0.0  # the sum of the transfer times of these requests

    def add(self, other: Flow) -> None:
        self.num_requests += other.num_requests
        self.num_tokens += other.num_tokens
        self.transfer_ms += other.transfer_ms


Pair = tuple[str, str]  # the ids of a prefill and a decode


@dataclass(slots=True)
class KvFlows:
    """`now` is in seconds. Any clock may be used, but always the same one."""

    _slots: deque[tuple[int, dict[Pair, Flow]]] = field(
        default_factory=lambda: deque(maxlen=int(WINDOW_S / _SLOT_S) + 1)
    )

    def handle(self, request: EndedRequest, now: float) -> None:
        if not (request.prefill_id and request.decode_id) or request.outcome == "failed":
            return
        number = int(now // _SLOT_S)
        if not self._slots or self._slots[-1][0] < number:
            self._slots.append((number, {}))
        flows = self._slots[-1][1]
        pair = (request.prefill_id, request.decode_id)
        if pair in flows or len(flows) < _MAX_PAIRS:
            known = flows.setdefault(pair, Flow())
            known.add(Flow(1, request.num_prompt_tokens, request.kv_transfer_ms))

    def flows(self, now: float) -> dict[Pair, Flow]:
        """The flow of each pair over the last minute."""
        first = int((now - WINDOW_S) // _SLOT_S)
        found: dict[Pair, Flow] = {}
        for number, flows in self._slots:
            if number > first:
                for pair, flow in flows.items():
                    found.setdefault(pair, Flow()).add(flow)
        return dict(sorted(found.items()))
