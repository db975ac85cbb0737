"""Lets jobs of the simulated engine wait until their LoRA adapter is loaded.

The sim model has no weights that an adapter could change. Instead, an adapter shifts the model's
states by an amount that is computed from the adapter's digest. So the KV and the tokens differ with
the content of the adapter. A job computes one leg, which is a request's stay on this engine.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path

from pdmesh.core.adapters.fit import AdapterFacts
from pdmesh.engine.adapters.adapter_host import AdapterHost, AdapterLimits
from pdmesh.engine.base import DecodeJob, Failed, LandingFreed, Output, PrefillJob
from pdmesh.engine.sim.config import SimConfig
from pdmesh.errors import AdapterMisfit, AdapterUnusable


class SimSlots:
    """Pretends to load adapters into slots."""

    async def load(self, digest: str, folder: Path) -> None:
        await asyncio.sleep(0)

    async def unload(self, digest: str) -> None:
        await asyncio.sleep(0)


class AdapterQueue:
    """The jobs that wait for their adapter.

    `go` is called with each job once its adapter is loaded. `give_up` is called with a prefill
    whose adapter cannot be loaded.
    """

    def __init__(
        self,
        config: SimConfig,
        go: Callable[[PrefillJob | DecodeJob], None],
        give_up: Callable[[PrefillJob], None],
        emit: Callable[[Output], None],
        die: Callable[[BaseException], None],
    ) -> None:
        self._go, self._give_up, self._emit = go, give_up, emit
        self._host: AdapterHost | None = None
        if config.max_adapters:
            limits = AdapterLimits(config.max_adapters, config.max_adapter_rank)
            folder = Path(tempfile.mkdtemp(prefix="pdmesh-adapters-"))
            self._host = AdapterHost(limits, SimSlots(), folder, emit, die)
        self._jobs: dict[int, PrefillJob | DecodeJob] = {}
        self._first_tokens: dict[int, int] = {}  # by leg: token 1 of waiting decodes

    @property
    def is_idle(self) -> bool:
        return not self._jobs and (self._host is None or self._host.is_idle)

    @property
    def num_waiting(self) -> int:
        return len(self._jobs)

    @property
    def num_signs(self) -> int:
        """Grows while the files of an adapter are being copied (`EngineStats`)."""
        return 0 if self._host is None else self._host.num_signs

    def begin(self, job: PrefillJob | DecodeJob) -> None:
        assert job.adapter is not None
        self._jobs[job.leg] = job
        if self._host is None:
            self._on_refused(job.leg, AdapterUnusable("this engine takes no adapters"))
            return
        self._host.acquire(
            job.leg,
            job.adapter,
            lambda: self._on_ready(job.leg),
            lambda error: self._on_refused(job.leg, error),
        )

    def join(self, leg: int, first_token: int) -> bool:
        """Keep token 1 for a decode that waits here. Return False if the leg does not wait here."""
        if leg not in self._jobs:
            return False
        self._first_tokens[leg] = first_token
        return True

    def abort(self, leg: int) -> PrefillJob | None:
        """Remove a leg. Returns the leg's job if a prefill waited here."""
        job = self._jobs.pop(leg, None)
        self._first_tokens.pop(leg, None)
        self.left(leg)
        if isinstance(job, DecodeJob):
            self._emit(LandingFreed(leg))
            return None
        return job

    def left(self, leg: int) -> None:
        """Release the leg's adapter, if the leg has one."""
        if self._host is not None:
            self._host.release(leg)

    def first_token(self, leg: int) -> int | None:
        """Remove and return the token that `join` kept for this leg. None if there is no token."""
        return self._first_tokens.pop(leg, None)

    def keep(self, digests: Collection[str]) -> None:
        if self._host is not None:
            self._host.keep(digests)

    async def inspect(self, path: str) -> AdapterFacts:
        if self._host is None:
            raise AdapterUnusable("this instance takes no adapters: set ENABLE_LORA")
        return await self._host.inspect(path)

    async def stop(self) -> None:
        if self._host is not None:
            await self._host.stop()

    def _on_ready(self, leg: int) -> None:
        if (job := self._jobs.pop(leg, None)) is not None:
            self._go(job)

    def _on_refused(self, leg: int, error: AdapterUnusable) -> None:
        job = self._jobs.pop(leg, None)
        self._first_tokens.pop(leg, None)
        if isinstance(job, PrefillJob):
            self._give_up(job)
        if job is not None:
            is_retryable = not isinstance(error, AdapterMisfit)
            self._emit(Failed(leg, error.reason, error.message, is_retryable))
        if isinstance(job, DecodeJob):
            self._emit(LandingFreed(leg))
