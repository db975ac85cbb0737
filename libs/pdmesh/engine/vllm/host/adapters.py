"""Loads LoRA adapters into vLLM's slots.

A slot is room for one loaded adapter. vLLM identifies a slot by an integer, and names blocks of its
prefix cache by the adapter's name and path. Here, name, path and integer are derived from the
digest of the adapter's content. So equal content has the same names whenever it is loaded. Other
content never has these names, even if an operator registers it under the same name.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from pdmesh.engine.adapters.adapter_host import AdapterHost, AdapterLimits
from pdmesh.engine.adapters.files import model_shapes
from pdmesh.engine.base import AdaptersChanged
from pdmesh.engine.vllm.config import VllmConfig
from pdmesh.errors import AdapterUnusable, EngineFailed

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

log = structlog.get_logger(__name__)


def slot_id(digest: str) -> int:
    """The integer of an adapter's slot: 60 bits of the digest, plus 1 because vLLM refuses 0."""
    return int(digest[:15], 16) + 1


class VllmSlots:
    """Implements `AdapterLoader`."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._loaded: dict[str, LoRARequest] = {}

    def request_of(self, digest: str) -> LoRARequest:
        """The argument that makes a vLLM request use this adapter. The adapter must be loaded."""
        return self._loaded[digest]

    async def load(self, digest: str, folder: Path) -> None:
        from vllm.lora.request import LoRARequest
        from vllm.v1.engine.exceptions import EngineDeadError

        if slot_id(digest) in map(slot_id, self._loaded):
            raise AdapterUnusable("another adapter has the same 60 bits of its digest")
        request = LoRARequest(f"adapter-{digest}", slot_id(digest), str(folder))
        try:
            await self._llm.add_lora(request)
        except EngineDeadError:
            raise
        except Exception as error:  # vLLM's errors have no common base
            raise AdapterUnusable(f"vLLM refused it: {_last_line(error)}") from error
        self._loaded[digest] = request

    async def unload(self, digest: str) -> None:
        """Raises vLLM's error, after which the content of the slot is unknown."""
        del self._loaded[digest]
        await self._llm.remove_lora(slot_id(digest))


class VllmAdapters:
    """The adapter slots of a started vLLM, and the AdapterHost that fills them."""

    def __init__(
        self,
        config: VllmConfig,
        llm: AsyncLLM,
        folder: Path,
        emit: Callable[[AdaptersChanged], None],
        die: Callable[[BaseException], None],
    ) -> None:
        self.slots = VllmSlots(llm)
        try:
            base = model_shapes(config.model_dir)
        except (OSError, ValueError) as exc:
            raise EngineFailed(f"cannot read the shapes of {config.model_dir}: {exc}") from exc
        limits = AdapterLimits(config.max_adapters, config.max_adapter_rank, base)
        self.host = AdapterHost(limits, self.slots, folder, emit, die)


def _last_line(error: Exception) -> str:
    """vLLM's own cause, without a traceback."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else error.__class__.__name__)[:300]
