"""What a worker says while it computes, so that a step that takes long is told from an engine that
hangs.

vLLM answers a ping between two steps only. A layer of a step is a sign of its own: on a CPU, where
a step may take seconds, it was computed when it is noted; on a GPU it was only queued there by
then, and the steps themselves, which are short, are the sign. Time on the processor would say
nothing: threads that wait for each other burn it too, and a GPU leaves it idle.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from pdmesh.engine.vllm.messages import RankMessage, Working

EVERY_S: Final = 0.25


class WorkSigns:
    """Of one rank. Called on vLLM's thread, between and within steps."""

    def __init__(
        self,
        rank: int,
        send: Callable[[RankMessage], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rank, self._send, self._clock = rank, send, clock
        self._num_signs = self._num_tokens = 0
        self._may_send_at = 0.0

    def step(self, num_tokens: int) -> None:
        """A step begins.

        One that computes nothing is no sign: vLLM turns while all its requests wait for KV.
        """
        if num_tokens:
            self._num_tokens += num_tokens
            self.layer()

    def layer(self) -> None:
        self._num_signs += 1
        now = self._clock()
        if now >= self._may_send_at:
            self._may_send_at = now + EVERY_S
            self._send(Working(self._rank, self._num_signs, self._num_tokens))
