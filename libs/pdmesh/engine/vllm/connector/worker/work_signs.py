"""Tells the host that a worker computes, so that a long step does not look like a hung engine.

vLLM answers a ping only between two steps, so each layer of a step counts as a sign of work. On a
CPU, where a step may take seconds, a layer is noted when it has been computed. On a GPU, the layer
has only been queued at that time, but steps are short there. CPU time would be no sign: threads
that wait for each other use it too, and a busy GPU leaves the CPU idle.

vLLM computes no step while it loads a LoRA adapter, so each layer of the adapter is a sign. The
host is the part of the instance outside the engine.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, Final

from pdmesh.engine.vllm.messages import RankMessage, Working

EVERY_S: Final = 0.25


class WorkSigns:
    """The signs of one rank. Called on vLLM's thread, between and within steps."""

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

        A step that computes nothing is not a sign, because vLLM runs empty steps while all requests
        wait for KV.
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


def sign_adapter_loads(sign: Callable[[], None]) -> None:
    """Patch vLLM's loading of LoRA adapters to call `sign`. Call it only once per process.

    vLLM calls `from_config` for each layer that it reads, and `_get_lora_layer_weights` for each
    layer that it puts into a slot.
    """
    from vllm.lora.lora_weights import LoRALayerWeights
    from vllm.lora.model_manager import LoRAModelManager

    # Any, because vLLM's functions are replaced
    read: Any = LoRALayerWeights.from_config.__func__
    find: Any = LoRAModelManager._get_lora_layer_weights

    @functools.wraps(read)
    def from_config(cls: type[LoRALayerWeights], *arguments: Any, **named: Any) -> Any:
        sign()
        return read(cls, *arguments, **named)

    @functools.wraps(find)
    def get_lora_layer_weights(manager: LoRAModelManager, *arguments: Any, **named: Any) -> Any:
        sign()
        return find(manager, *arguments, **named)

    LoRALayerWeights.from_config = classmethod(from_config)
    LoRAModelManager._get_lora_layer_weights = get_lora_layer_weights
