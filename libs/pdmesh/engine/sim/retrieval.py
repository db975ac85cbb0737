"""Retrieving KV at the sim engine's decode half: pull, scatter into fresh blocks, read the digest back.

Pulls run beside the step loop, so that running sequences go on drawing (S52); each verified range is scattered as it
lands. One that ends lets the next begin (S53). A decode that was started before token 1 is known does not wait
its turn, since its KV comes at the pace of prefill, and joins when both are there. A landing range is given back
exactly once, when the agent or this code knows that no late write can reach it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from pdmesh import failpoints
from pdmesh.core.kv.transfer.pull_queue import PullQueue
from pdmesh.core.kv.transfer.ticket import PullFailure
from pdmesh.engine.base import DecodeJob, Failed, KvPulling, KvReceived, LandingFreed, Output
from pdmesh.engine.sim.block_pool import BlockPool
from pdmesh.engine.sim.memory import PagedMemory
from pdmesh.engine.sim.model import SimModel
from pdmesh.errors import KvTransferFailed
from pdmesh.kv.agent.agent import KvAgent
from pdmesh.kv.transport.base import ByteArray
from pdmesh.net.tasks import watched

_TICK_S: Final = 0.01  # more than a loop's timers may be early
_QUICK_BYTES: Final = 1 << 20  # of KV: read within the loop's turn, a thread would cost more


@dataclass(frozen=True, slots=True)
class Retrieved:
    """A sequence whose KV is in `blocks`; `digest` is of the bytes there."""

    job: DecodeJob
    first_token: int
    blocks: list[int]
    state: int
    digest: int


@dataclass(slots=True)
class _Retrieval:
    """From `begin` until it joined, failed or was aborted. `blocks` are held while it is pulled and after."""

    job: DecodeJob
    first_token: int | None
    deadline: float
    started: float
    blocks: list[int] = field(default_factory=list)
    task: asyncio.Task[None] | None = None  # of the pull, from its turn on
    has_kv: bool = False
    digest: int = 0  # of it
    waits_since: float = math.inf  # for bytes alone: its turn has come, and prefill is done


class Retriever:
    def __init__(
        self,
        model: SimModel,
        memory: PagedMemory,
        pool: BlockPool,
        agent: KvAgent,
        max_pulls: int,
        emit: Callable[[Output], None],
        on_retrieved: Callable[[Retrieved], None],
        die: Callable[[BaseException], None],
    ) -> None:
        self._model, self._memory, self._pool = model, memory, pool
        self._emit, self._on_retrieved = emit, on_retrieved
        self._agent, self._die = agent, die
        self._queue: PullQueue[int] = PullQueue(max_pulls)
        self._retrievals: dict[int, _Retrieval] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._landings: dict[int, int] = {}  # offset -> leg
        self._pulling: dict[int, _Pull] = {}  # by offset of the landing

    @property
    def num_retrieving(self) -> int:
        return len(self._retrievals)

    @property
    def num_queued(self) -> int:
        return self._queue.num_waiting

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=1.0)

    def begin(self, job: DecodeJob) -> None:
        now = time.monotonic()
        retrieval = _Retrieval(job, job.first_token, now + job.deadline_s, now)
        self._retrievals[job.leg] = retrieval
        self._landings[job.landing.offset] = job.leg
        if job.first_token is None:
            self._start(job.leg)
            return
        source = (job.ticket.instance_id, job.ticket.incarnation)
        until = retrieval.deadline
        self._start_all(self._queue.add(job.leg, job.ticket.kv_bytes, source, until))
        if self._queue.is_waiting(job.leg):
            asyncio.get_running_loop().call_later(job.deadline_s + _TICK_S, self._look_for_overdue)
            self._spawn(self._keep(job), f"keep-{job.leg}")

    def join(self, leg: int, first_token: int) -> None:
        retrieval = self._retrievals.get(leg)
        if retrieval is not None and retrieval.first_token is None:
            retrieval.first_token = first_token
            retrieval.waits_since = time.monotonic()
            self._agent.expect(retrieval.job.ticket.ticket_id, retrieval.job.stall_s)
            self._go_on_if_complete(retrieval)

    def abort(self, leg: int) -> None:
        """What was pulled is dropped; a pull under way is cancelled, and the agent frees its landing range."""
        if (retrieval := self._retrievals.pop(leg, None)) is None:
            return
        if retrieval.task is None:
            self._end_in_queue(retrieval.job)
            self._start_all(self._queue.end(leg))
        elif retrieval.has_kv:
            self._pool.release(retrieval.blocks)
        else:
            retrieval.task.cancel()

    def free_landing(self, offset: int) -> None:
        """The range is free of late writes; announced once per job, and after its blocks are given back."""
        if (pull := self._pulling.get(offset)) is not None:
            pull.is_landing_free = True
        elif (leg := self._landings.pop(offset, None)) is not None:
            self._emit(LandingFreed(leg))

    # -- one pull ---------------------------------------------------------------------------------

    def _start_all(self, legs: list[int]) -> None:
        for leg in legs:
            self._start(leg)

    def _start(self, leg: int) -> None:
        retrieval = self._retrievals[leg]
        pull = self._pulling[retrieval.job.landing.offset] = _Pull(self, retrieval)
        retrieval.task = self._spawn(pull.run(), f"pull-{leg}")
        retrieval.task.add_done_callback(pull.on_done)
        self._emit(KvPulling(leg))

    async def _keep(self, job: DecodeJob) -> None:
        """Its lease is renewed while it waits its turn; should that not work, its pull will say why."""
        with contextlib.suppress(KvTransferFailed):
            await self._agent.keep(job.ticket, job.deadline_s)

    def _look_for_overdue(self) -> None:
        dropped, begun = self._queue.drop_overdue(time.monotonic())
        for leg in dropped:
            self._end_in_queue(self._retrievals.pop(leg).job)
            reason = PullFailure.OVERDUE
            why = f"{reason}: its turn did not come in time"
            self._emit(Failed(leg, KvTransferFailed.default_reason, why, cause=reason))
        self._start_all(begun)

    def _end_in_queue(self, job: DecodeJob) -> None:
        """It is over before its turn."""
        self._agent.let_go(job.ticket.ticket_id)
        self.free_landing(job.landing.offset)

    def _spawn(self, work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        task = watched(work, name, self._die)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _go_on_if_complete(self, retrieval: _Retrieval) -> None:
        if not retrieval.has_kv or retrieval.first_token is None:
            return
        job, blocks = retrieval.job, retrieval.blocks
        del self._retrievals[job.leg]
        state = self._model.last_state(np.frombuffer(job.prompt, np.uint32))
        got = Retrieved(job, retrieval.first_token, blocks, state, retrieval.digest)
        self._on_retrieved(got)


class _Pull:
    """A retrieval's turn: its blocks, from allocation to the moment they are complete or given back."""

    def __init__(self, owner: Retriever, retrieval: _Retrieval) -> None:
        self._owner, self._retrieval = owner, retrieval
        self._has_begun = False
        self.is_landing_free = False

    async def run(self) -> None:
        owner, retrieval = self._owner, self._retrieval
        job = retrieval.job
        self._has_begun = True
        if retrieval.first_token is not None:
            retrieval.waits_since = time.monotonic()
        used = self._allocate()
        try:
            # Counted from its turn; one that waits for prefill takes none.
            left_s = max(0.0, retrieval.deadline - time.monotonic())
            deadline_s = job.deadline_s if job.first_token is not None else left_s
            await owner._agent.pull(
                job.ticket,
                job.landing,
                deadline_s=deadline_s,
                stall_s=math.inf if retrieval.first_token is None else job.stall_s,
                on_silent=lambda: owner._start_all(owner._queue.fell_silent(job.leg)),
                on_range=lambda offset, data: self._land(offset, data, used),
            )
        except KvTransferFailed as exc:
            owner._retrievals.pop(job.leg, None)
            why = f"{exc.reason}: {exc.message}"
            owner._emit(Failed(job.leg, exc.default_reason, why, cause=exc.reason))
            return
        if failpoints.hit("decode.pulled") == "zero-kv":
            for cache in owner._memory.caches:
                cache[used] = 0
        owner.free_landing(job.landing.offset)
        now = time.monotonic()
        waited_s = max(0.0, now - retrieval.waits_since)
        duration_s = now - retrieval.started
        owner._emit(KvReceived(job.leg, job.ticket.kv_bytes, duration_s, waited_s=waited_s))
        retrieval.digest = await self._digest(used)
        retrieval.has_kv = True
        owner._go_on_if_complete(retrieval)

    async def _digest(self, blocks: list[int]) -> int:
        """It reads all of the prompt's KV: of a long one in a thread, so that running sequences step meanwhile (S52)."""
        job, memory = self._retrieval.job, self._owner._memory
        if job.ticket.kv_bytes <= _QUICK_BYTES:
            return memory.digest(blocks, len(job.prompt))
        return await asyncio.to_thread(memory.digest, blocks, len(job.prompt))

    def _land(self, offset: int, data: ByteArray, blocks: list[int]) -> None:
        """A verified range goes into its blocks while the next ones are on their way."""
        self._owner._memory.blocks.scatter_part(data, offset, blocks)
        failpoints.hit("decode.range")

    def _allocate(self) -> list[int]:
        """Blocks for the prompt and its longest answer, which admission has reserved; returns the prompt's."""
        params, job = self._owner._model.params, self._retrieval.job
        last = min(len(job.prompt) + 1 + job.sampling.max_tokens, params.max_model_len)
        self._retrieval.blocks = self._owner._pool.allocate(-(-last // params.block_size))
        return self._retrieval.blocks[: -(-len(job.prompt) // params.block_size)]

    def on_done(self, task: asyncio.Task[None]) -> None:
        owner, retrieval = self._owner, self._retrieval
        if self._has_begun and not retrieval.has_kv:
            owner._pool.release(retrieval.blocks)
        offset = retrieval.job.landing.offset
        del owner._pulling[offset]
        if (
            self.is_landing_free or not self._has_begun
        ):  # if it never ran, the agent knows nothing of it
            owner.free_landing(offset)
        owner._start_all(owner._queue.end(retrieval.job.leg))
