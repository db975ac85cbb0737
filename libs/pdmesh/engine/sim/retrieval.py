"""Retrieving KV at the sim engine's decode half: pull, scatter into fresh blocks, read the digest back.

Pulls run beside the step loop, so that running sequences go on drawing (S52). How many at once, and that
their bytes fit, is the admission's business. A landing range is given back exactly once, when the agent
or this code knows that no late write can reach it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pdmesh import failpoints
from pdmesh.engine.base import DecodeJob, Failed, KvReceived, LandingFreed, Output
from pdmesh.engine.sim.block_pool import BlockPool
from pdmesh.engine.sim.memory import PagedMemory
from pdmesh.engine.sim.model import SimModel
from pdmesh.errors import KvTransferFailed
from pdmesh.kv.agent import KvAgent
from pdmesh.kv.scatter import recv_scatter


@dataclass(frozen=True, slots=True)
class Retrieved:
    """A sequence whose KV is in `blocks`; `digest` is of the bytes there."""

    job: DecodeJob
    blocks: list[int]
    state: int
    digest: int


class Retriever:
    def __init__(
        self,
        model: SimModel,
        memory: PagedMemory,
        pool: BlockPool,
        agent: KvAgent,
        emit: Callable[[Output], None],
        on_retrieved: Callable[[Retrieved], None],
        die: Callable[[BaseException], None],
    ) -> None:
        self._model, self._memory, self._pool = model, memory, pool
        self._emit, self._on_retrieved = emit, on_retrieved
        self._agent, self._die = agent, die
        self._pulls: dict[int, asyncio.Task[None]] = {}
        self._landings: dict[int, int] = {}  # offset -> leg
        self._unasked: set[int] = (
            set()
        )  # legs whose pull has not begun, of which the agent knows nothing

    @property
    def num_retrieving(self) -> int:
        return len(self._pulls)

    async def stop(self) -> None:
        for task in self._pulls.values():
            task.cancel()
        if self._pulls:
            await asyncio.wait(list(self._pulls.values()), timeout=1.0)

    def begin(self, job: DecodeJob) -> None:
        self._landings[job.landing.offset] = job.leg
        self._unasked.add(job.leg)
        task = asyncio.create_task(self._retrieve(job), name=f"pull-{job.leg}")
        self._pulls[job.leg] = task
        task.add_done_callback(lambda done: self._on_pull_done(job, done))

    def abort(self, leg: int) -> None:
        if (task := self._pulls.get(leg)) is not None:
            task.cancel()

    def _on_pull_done(self, job: DecodeJob, task: asyncio.Task[None]) -> None:
        self._pulls.pop(job.leg, None)
        if job.leg in self._unasked:  # aborted before it ran
            self._unasked.remove(job.leg)
            self.free_landing(job.landing.offset)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._die(error)

    async def _retrieve(self, job: DecodeJob) -> None:
        self._unasked.remove(job.leg)
        started = asyncio.get_running_loop().time()
        try:
            await self._agent.pull(job.ticket, job.landing, deadline_s=job.deadline_s)
        except KvTransferFailed as exc:
            self._emit(Failed(job.leg, exc.default_reason, f"{exc.reason}: {exc.message}"))
            return
        got = self._take(job)
        self.free_landing(job.landing.offset)
        duration = asyncio.get_running_loop().time() - started
        self._emit(KvReceived(job.leg, job.ticket.kv_bytes, duration))
        self._on_retrieved(got)

    def _take(self, job: DecodeJob) -> Retrieved:
        """From the landing range into blocks. Admission has reserved them."""
        size = self._model.params.block_size
        num_tokens = len(job.prompt)
        landed = self._agent.landing(job.landing)[: job.ticket.kv_bytes]
        if failpoints.hit("decode.pulled") == "zero-kv":
            landed[:] = 0
        last = num_tokens + 1 + job.sampling.max_tokens
        blocks = self._pool.allocate(-(-min(last, self._model.params.max_model_len) // size))
        used = blocks[: -(-num_tokens // size)]
        recv_scatter(landed, self._memory.caches, used)
        states = self._model.states(np.frombuffer(job.prompt, np.uint32))
        return Retrieved(job, blocks, int(states[-1]), self._memory.digest(blocks, num_tokens))

    def free_landing(self, offset: int) -> None:
        """The range is free of late writes; announced once per job."""
        if (leg := self._landings.pop(offset, None)) is not None:
            self._emit(LandingFreed(leg))
