"""Gives requests to vLLM, and reads the outputs of each request in a task.

Before vLLM gets a request, the request's LoRA adapter is loaded. The tiers, which keep KV in host
memory, in peers' memory and in files, have also answered which blocks of the prompt they provide.
`Jobs` decides what the outputs mean. If vLLM refuses a request or fails it, only that request ends.
If the task of a request that vLLM took crashes, the engine counts as dead, since the state of the
request is unknown. A leg is a request's stay on this instance.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import structlog

from pdmesh import failpoints
from pdmesh.core.adapters.adapter import Adapter
from pdmesh.core.images.prompt_image import PromptImage
from pdmesh.core.instance.urgency import DEFAULT_PRIORITY
from pdmesh.core.kv.tiers.owner import owner_of
from pdmesh.engine.awaited_embeddings import AwaitedEmbeddings
from pdmesh.engine.base import Sampling
from pdmesh.engine.vllm.host.adapters import VllmAdapters
from pdmesh.engine.vllm.host.job_facts import Drawn
from pdmesh.engine.vllm.host.sampling import drawn, num_told, sampling_params
from pdmesh.engine.vllm.host.tier_client import TierClient
from pdmesh.engine.vllm.images.inputs import VllmImages
from pdmesh.errors import AdapterUnusable, EngineFailed, ImageMisfit, ImageUnusable, MeshError
from pdmesh.net.tasks import watched

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Reader:
    """One vLLM request.

    `request_id` is vLLM's name of the request, and empty until vLLM has taken the request.
    """

    leg: int
    num_top: int | None
    adapter: Adapter | None = None
    images: Sequence[PromptImage] = ()
    priority: int = DEFAULT_PRIORITY
    arrived_at: float = field(default_factory=time.time)
    request_id: str = ""
    is_cancelled: bool = False
    awaits_adapter: bool = False


@dataclass(frozen=True, slots=True)
class RequestEvents:
    """The callbacks of the requests.

    `refused` is called with the error if vLLM does not take a request. `ended` is the last call
    about a leg.
    """

    drawn: Callable[[Drawn], None]
    refused: Callable[[int, MeshError], None]
    ended: Callable[[int], None]
    die: Callable[[str], None]


class GathersEmbeddings(Protocol):
    """The host's half of fetching the image embeddings that an encoder instance makes."""

    @property
    def awaited(self) -> AwaitedEmbeddings: ...

    async def landed(self, leg: int, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Wait for the leg's embeddings. Returns parameters for vLLM, empty if none arrived."""
        ...

    def forget(self, leg: int) -> None:
        """Drop the embeddings of a request that vLLM did not take."""
        ...


class Requests:
    """`num_held` returns the number of a prompt's leading blocks in the engine's own cache."""

    def __init__(
        self,
        llm: AsyncLLM,
        instance_id: str,
        tiers: TierClient | None,
        num_held: Callable[[Sequence[bytes]], int],
        events: RequestEvents,
        adapters: VllmAdapters | None = None,
    ) -> None:
        self._llm, self._instance_id, self._adapters = llm, instance_id, adapters
        self.images = VllmImages(llm, None)
        self.embeddings: GathersEmbeddings | None = None  # set for a model that reads images
        self._tiers, self._num_held, self._events = tiers, num_held, events
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._readers: dict[int, _Reader] = {}
        self._aborts: set[asyncio.Task[None]] = set()

    @property
    def is_idle(self) -> bool:
        return not (self._tasks or self._readers)

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        return [*self._tasks.values(), *self._aborts]

    def submit(
        self,
        leg: int,
        prompt: list[int],
        sampling: Sampling,
        max_tokens: int,
        cache_salt: str,
        kv_transfer_params: dict[str, Any] | None,
        names: Sequence[bytes] = (),
        adapter: Adapter | None = None,
        images: Sequence[PromptImage] = (),
        priority: int = DEFAULT_PRIORITY,
    ) -> None:
        """`names` are the blocks that the tiers should provide if they can.

        The request's arrival time is now, even if its adapter and its blocks take long to load.
        """
        reader = self._readers[leg] = _Reader(leg, num_told(sampling), adapter, images, priority)
        work = self._begin(
            reader, prompt, sampling, max_tokens, cache_salt, kv_transfer_params, names
        )
        task = watched(work, f"vllm-{leg}", lambda error: self._leg_died(reader, error))
        self._tasks[leg] = task
        task.add_done_callback(lambda _: self._forget(leg))

    def cancel(self, leg: int) -> None:
        """Abort the request in vLLM. Its task ends with the output that reports the abort.

        A request that waits for its adapter ends at once, because loading an adapter may take long.
        """
        reader = self._readers.get(leg)
        if reader is None:
            return
        reader.is_cancelled = True
        if reader.awaits_adapter and leg in self._tasks:
            self._tasks[leg].cancel()
            return
        if self.embeddings is not None:
            self.embeddings.awaited.tell(leg, None)  # end the wait for embeddings
        if reader.request_id:
            name = f"vllm-abort-{leg}"
            abort = self._llm.abort(reader.request_id, internal=True)
            task = watched(abort, name, lambda error: self._died(name, error))
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)

    async def _begin(
        self,
        reader: _Reader,
        prompt: list[int],
        sampling: Sampling,
        max_tokens: int,
        cache_salt: str,
        kv_transfer_params: dict[str, Any] | None,
        names: Sequence[bytes],
    ) -> None:
        """Load the adapter, let the tiers fetch blocks, and then give vLLM the request (S77)."""
        if reader.adapter is not None:
            reader.awaits_adapter = True
            try:
                await self._load(reader.leg, reader.adapter)
            except AdapterUnusable as error:
                self._refused(reader.leg, error)
                return
            except asyncio.CancelledError:
                if reader.is_cancelled:  # otherwise the engine is stopping
                    self._refused(reader.leg, EngineFailed("it was given up"))
                raise
            finally:
                reader.awaits_adapter = False
        if names and self._tiers is not None:
            first = self._num_held(names)
            offer = await self._tiers.fetch(reader.leg, names, owner_of(cache_salt), first)
            if offer is not None:
                kv_transfer_params = {**(kv_transfer_params or {}), "tiers": offer}
        params = sampling_params(sampling, max_tokens, kv_transfer_params)
        await self._read(reader, prompt, params, cache_salt)

    async def _load(self, leg: int, adapter: Adapter) -> None:
        """Raises AdapterUnusable."""
        if self._adapters is None:
            raise AdapterUnusable("this engine takes no adapters")
        await self._adapters.host.acquired(leg, adapter)

    def _lora_request(self, adapter: Adapter | None) -> LoRARequest | None:
        if adapter is None or self._adapters is None:
            return None
        return self._adapters.slots.request_of(adapter.digest)

    async def _read(self, reader: _Reader, prompt: list[int], params: Any, cache_salt: str) -> None:
        """Give vLLM the request, and forward its outputs.

        `params` is vLLM's own type, imported late. An abort never cancels this task. vLLM takes the
        request at some unknown point in `add_request`. From then on, the request must be aborted in
        vLLM.
        """
        from vllm.inputs import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError

        leg, queue = reader.leg, None
        name = f"{self._instance_id}-{leg}"
        try:
            if reader.images:
                request = await self.images.input_of(
                    prompt, reader.images, cache_salt, lambda: reader.is_cancelled
                )
                await self._gather_embeddings(leg, request, params)
            else:
                request = tokens_input(prompt, cache_salt=cache_salt or None)
            lora = self._lora_request(reader.adapter)
            queue = await self._llm.add_request(
                name,
                request,
                params,
                arrival_time=reader.arrived_at,
                lora_request=lora,
                priority=reader.priority,
            )
            reader.request_id = queue.request_id
            if reader.is_cancelled:
                await self._llm.abort(queue.request_id, internal=True)
            is_finished = False
            while not is_finished:
                output = queue.get_nowait() or await queue.get()
                is_finished = output.finished
                failpoints.hit("decode.token")
                self._events.drawn(drawn(leg, output, reader.num_top))
        except (
            ImageUnusable,
            ImageMisfit,
            EngineFailed,
        ) as error:  # vLLM has not taken the request
            self._refused(leg, error)
        except EngineDeadError:
            self._events.die("vLLM's engine process died; see its log")
        except Exception as error:  # noqa: BLE001  vLLM's errors have no common base; each ends one leg
            log.warning("vllm.request.failed", leg=leg, error=error.__class__.__name__)
            await self._on_error(reader, error)
        finally:
            if queue is not None:
                queue.close()

    async def _gather_embeddings(self, leg: int, request: Any, params: Any) -> None:
        """If an encoder makes embeddings for the request, wait for them.

        Embeddings that arrive are named in `params`.
        """
        if self.embeddings is not None and leg in self.embeddings.awaited:
            landed = await self.embeddings.landed(leg, request)
            if landed:
                told = params.extra_args or {}
                transfer = {**told.get("kv_transfer_params", {}), **landed}
                params.extra_args = {**told, "kv_transfer_params": transfer}

    async def _on_error(self, reader: _Reader, error: Exception) -> None:
        if not reader.request_id:
            message = f"vLLM refused the request: {error.__class__.__name__}"
            self._refused(reader.leg, EngineFailed(message))
            return
        await self._llm.abort(reader.request_id, internal=True)
        self._events.drawn(Drawn(reader.leg, (), is_error=True))

    def _refused(self, leg: int, error: MeshError) -> None:
        if self._tiers is not None:
            self._tiers.forget(leg)
        if self.embeddings is not None:
            self.embeddings.forget(leg)
        self._events.refused(leg, error)

    def _leg_died(self, reader: _Reader, error: BaseException) -> None:
        if reader.request_id:
            self._died(f"vllm-{reader.leg}", error)
            return
        log.error("vllm.request.died", leg=reader.leg, exc_info=error)
        self._refused(reader.leg, EngineFailed(f"it did not begin: {error.__class__.__name__}"))

    def _died(self, task: str, error: BaseException) -> None:
        log.error("vllm.task.failed", task=task, exc_info=error)
        self._events.die(f"{task} failed: {error.__class__.__name__}")

    def _forget(self, leg: int) -> None:
        self._tasks.pop(leg, None)
        self._readers.pop(leg, None)
        if self._adapters is not None:
            self._adapters.host.release(leg)
        self._events.ended(leg)
