"""Copies, verifies, loads and unloads the LoRA adapters of an engine, in the background.

`core.adapters` decides which adapters occupy the engine's slots (`AdapterSlots`). An adapter stays
loaded while a leg, which is a request's stay on this engine, uses it. An adapter is loaded from a
private copy, and the copy is hashed while it is made. So the loaded content always matches the
adapter's digest, even if the operator's folder changes later.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import structlog

from pdmesh.core.adapters.adapter import Adapter
from pdmesh.core.adapters.adapter_slots import (
    AdapterSlots,
    CannotUse,
    Discard,
    Effect,
    FetchFiles,
    Load,
    Ready,
    Unload,
)
from pdmesh.core.adapters.fit import AdapterFacts, Shapes, misfit
from pdmesh.engine.adapters.files import read_adapter
from pdmesh.engine.base import AdaptersChanged
from pdmesh.errors import AdapterMisfit, AdapterUnusable, InvalidRequest
from pdmesh.net.tasks import watched

log = structlog.get_logger(__name__)

_INSPECTIONS: Final = 2  # inspections that run at the same time
_ANY_RANK: Final = 1 << 20


class AdapterLoader(Protocol):
    """Loads adapters into an engine. At most one call runs at a time."""

    async def load(self, digest: str, folder: Path) -> None:
        """Load an adapter. `folder` does not change until `unload`. Raises AdapterUnusable."""
        ...

    async def unload(self, digest: str) -> None: ...


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """`base` has the shapes of the model's weights. None if they are not known."""

    num_slots: int
    max_rank: int
    base: Shapes | None = None


@dataclass(frozen=True, slots=True)
class _Asker:
    on_ready: Callable[[], None]
    on_refused: Callable[[AdapterUnusable], None]


class AdapterHost:
    """The adapters of one engine.

    `folder` is an empty folder that only this engine uses. `die` is called with an unexpected
    error, after which the engine's state is unknown.
    """

    def __init__(
        self,
        limits: AdapterLimits,
        loader: AdapterLoader,
        folder: Path,
        emit: Callable[[AdaptersChanged], None],
        die: Callable[[BaseException], None],
    ) -> None:
        self._limits, self._loader, self._folder = limits, loader, folder
        self._emit, self._die = emit, die
        self._slots = AdapterSlots(limits.num_slots)
        self._askers: dict[int, _Asker] = {}
        self._inspecting = asyncio.Semaphore(_INSPECTIONS)
        self._task: asyncio.Task[None] | None = None
        self._fetched: AdapterFacts | None = None  # the facts of the adapter fetched last
        self._began_at = 0.0  # when the current adapter's fetch began
        self.num_signs = 0  # grows while an adapter's files are being copied (`EngineStats`)

    @property
    def is_idle(self) -> bool:
        """Whether no leg uses an adapter or waits for one."""
        self._slots.check_invariants()
        return not self._askers and not self._slots.num_waiting

    @property
    def num_waiting(self) -> int:
        """Legs whose adapter is not loaded yet."""
        return self._slots.num_waiting

    def acquire(
        self,
        leg: int,
        adapter: Adapter,
        on_ready: Callable[[], None],
        on_refused: Callable[[AdapterUnusable], None],
    ) -> None:
        """Call one of the two callbacks, immediately if the adapter is loaded.

        After `on_ready`, the adapter stays loaded until `release`.
        """
        self._askers[leg] = _Asker(on_ready, on_refused)
        now = asyncio.get_running_loop().time()
        self._carry_out(self._slots.wanted(leg, adapter, now))

    async def acquired(self, leg: int, adapter: Adapter) -> None:
        """Wait until the adapter is loaded for the leg. Raises AdapterUnusable."""
        ready: asyncio.Future[AdapterUnusable | None]
        ready = asyncio.get_running_loop().create_future()

        def tell(error: AdapterUnusable | None) -> None:
            if not ready.done():
                ready.set_result(error)

        self.acquire(leg, adapter, lambda: tell(None), tell)
        if (error := await ready) is not None:
            raise error

    def release(self, leg: int) -> bool:
        """End a leg's use of its adapter. Return False if the leg has no adapter."""
        asker = self._askers.pop(leg, None)
        self._carry_out(self._slots.left(leg))
        return asker is not None

    def keep(self, digests: Iterable[str]) -> None:
        """Keep the adapters with these digests. Unload all others once no leg uses them."""
        self._carry_out(self._slots.keep(digests))

    async def inspect(self, path: str) -> AdapterFacts:
        """Read and check an adapter before it is registered. Raises AdapterUnusable."""
        async with self._inspecting:
            facts = await asyncio.to_thread(read_adapter, Path(path))
        self._check(facts)
        self._slots.was_found_good(facts.digest)
        return facts

    async def stop(self) -> None:
        """Remove the copies with their folder. Nothing is unloaded, because the engine stops."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task], timeout=1.0)
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    def _carry_out(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case Ready(leg):
                    self._askers[leg].on_ready()
                case CannotUse(leg, why, is_final):
                    kind = AdapterMisfit if is_final else AdapterUnusable
                    self._askers.pop(leg).on_refused(kind(why))
                case FetchFiles(adapter):
                    self._move(self._fetch(adapter), f"adapter-fetch-{adapter.name}")
                case Load(adapter):
                    self._move(self._load(adapter), f"adapter-load-{adapter.name}")
                case Unload(digest):
                    self._move(self._unload(digest), "adapter-unload")
                case Discard(digest):
                    self._move(self._discard(digest), "adapter-discard")

    def _move(self, work: Any, name: str) -> None:  # `work` is a coroutine
        self._task = watched(work, name, self._die)

    async def _fetch(self, adapter: Adapter) -> None:
        self._began_at = asyncio.get_running_loop().time()
        try:
            adapter.check()
            self._fetched = await asyncio.to_thread(self._copied, adapter)
            self._check(self._fetched)
        except (AdapterUnusable, InvalidRequest) as exc:
            await self._failed(adapter, exc)
            return
        self._carry_out(self._slots.was_fetched(adapter))

    async def _load(self, adapter: Adapter) -> None:
        digest, facts = adapter.digest, self._fetched
        assert facts is not None
        assert facts.digest == digest
        try:
            await self._loader.load(digest, self._copy_of(digest))
        except AdapterUnusable as exc:
            await self._failed(adapter, exc)
            return
        seconds = asyncio.get_running_loop().time() - self._began_at
        log.info(
            "adapter.loaded",
            adapter=adapter.name,
            digest=digest,
            rank=facts.rank,
            seconds=round(seconds, 3),
        )
        effects = self._slots.was_loaded(adapter)
        self._emit(AdaptersChanged(self._slots.loaded, "loaded", seconds))
        self._carry_out(effects)

    async def _failed(self, adapter: Adapter, error: AdapterUnusable | InvalidRequest) -> None:
        why, is_final = error.message, isinstance(error, AdapterMisfit)
        await asyncio.to_thread(self._forget_copy, adapter.digest)
        log.warning("adapter.refused", adapter=adapter.name, digest=adapter.digest, error=why)
        self._emit(AdaptersChanged(self._slots.loaded, "failed"))
        now = asyncio.get_running_loop().time()
        why = f"adapter {adapter.name}: {why}"
        self._carry_out(self._slots.failed(adapter, why, now, is_final=is_final))

    async def _unload(self, digest: str) -> None:
        await self._loader.unload(digest)
        await asyncio.to_thread(self._forget_copy, digest)
        log.info("adapter.unloaded", digest=digest)
        self._emit(AdaptersChanged(self._slots.loaded, "unloaded"))
        self._carry_out(self._slots.was_unloaded(digest))

    async def _discard(self, digest: str) -> None:
        await asyncio.to_thread(self._forget_copy, digest)
        self._carry_out(self._slots.was_discarded(digest))

    def _copied(self, adapter: Adapter) -> AdapterFacts:
        """Runs in a thread. Raises AdapterUnusable."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as exc:
            raise AdapterUnusable(f"cannot make {self._folder}: {exc.strerror}") from exc
        self._forget_copy(adapter.digest)
        copy = self._copy_of(adapter.digest)
        facts = read_adapter(Path(adapter.path), copy, self._sign)
        if facts.digest != adapter.digest:
            raise AdapterUnusable(
                f"the content of {adapter.path} has changed since it was registered: add it again"
            )
        return facts

    def _sign(self) -> None:
        """Show that the copying makes progress. Only the thread that copies calls this."""
        self.num_signs += 1

    def _check(self, facts: AdapterFacts) -> None:
        """Raises AdapterUnusable, or AdapterMisfit if even a higher `max_rank` would not help."""
        base = self._limits.base
        if why := misfit(facts, self._limits.max_rank, base):
            raise (AdapterMisfit if misfit(facts, _ANY_RANK, base) else AdapterUnusable)(why)

    def _copy_of(self, digest: str) -> Path:
        return self._folder / digest

    def _forget_copy(self, digest: str) -> None:
        shutil.rmtree(self._copy_of(digest), ignore_errors=True)
