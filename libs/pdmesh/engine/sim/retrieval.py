"""Pulls KV for the simulated engine's decodes, copies it into new blocks, and computes its digest.

A pull copies a prompt's KV from the prefill to a range of memory here, the *landing*. To *scatter*
is to copy the KV from the landing to the engine's blocks. `core.kv.transfer.incoming_blocks`
decides when each of these happens, as it does for vLLM's workers. Pulls run beside the step loop,
so that running sequences keep drawing (S52). A leg is a request's stay on this engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from pdmesh import failpoints
from pdmesh.core.kv.transfer.incoming_blocks import IncomingBlocks
from pdmesh.core.kv.transfer.incoming_events import (
    AgentLandingFreed,
    BoundSilence,
    CancelPull,
    CompleteLoad,
    FirstTokenKnown,
    IncomingEffect,
    IncomingEvent,
    KeepLease,
    LoadCancelled,
    LoadFailure,
    LoadStarted,
    PullEnded,
    PullFellSilent,
    RangeScattered,
    RangeVerified,
    ReleaseBlocks,
    ReportLoad,
    StartPull,
    StopRenewing,
)
from pdmesh.core.kv.transfer.receiver_events import FreeLanding
from pdmesh.core.kv.transfer.ticket import PullFailure
from pdmesh.core.model import Tick
from pdmesh.engine.base import DecodeJob, Failed, KvPulling, KvReceived, LandingFreed, Output
from pdmesh.engine.sim.memory import SimKv
from pdmesh.engine.sim.model import shift_of, tokens_of
from pdmesh.errors import KvTransferFailed
from pdmesh.kv.agent.agent import KvAgent
from pdmesh.kv.transport.base import ByteArray
from pdmesh.kv.transport.memory_access import in_host
from pdmesh.net.tasks import watched

T = TypeVar("T")

_TICK_S: Final = 0.01  # the loop's timers may be early, but by less than this
_QUICK_BYTES: Final = 1 << 20  # KV up to this size is read on the loop; a thread would cost more
# A verified range is scattered in slices of this size, one in each turn of the event loop. So a
# step that becomes due waits for one slice, not for the whole range (S52).
_SLICE_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Retrieved:
    """A sequence whose KV is in `blocks`. `digest` was computed from the bytes of these blocks."""

    job: DecodeJob
    first_token: int
    blocks: list[int]
    state: int
    digest: int


@dataclass(slots=True)
class _Retrieval:
    """One decode, from `begin` until its sequence joins the batch or its blocks are released."""

    job: DecodeJob
    first_token: int | None
    blocks: list[int] = field(default_factory=list)  # for the prompt and its longest answer
    pull: asyncio.Task[LoadFailure | None] | None = None  # None until the pull begins
    has_landing: bool = True  # true before the pull begins, and after it has succeeded
    digest: int | None = None  # the digest of the KV; None until the KV was read
    is_complete: bool = False
    slices: deque[tuple[int, ByteArray]] = field(default_factory=deque)  # to scatter: offset, bytes
    scattered: asyncio.Future[None] | None = None  # done when no slice is left; None at first


class Retriever:
    def __init__(
        self,
        kv: SimKv,
        agent: KvAgent,
        max_pulls: int,
        emit: Callable[[Output], None],
        on_retrieved: Callable[[Retrieved], None],
        die: Callable[[BaseException], None],
    ) -> None:
        self._memory, self._pool = kv.memory, kv.pool
        self._emit, self._on_retrieved = emit, on_retrieved
        self._agent, self._die = agent, die
        self._loads = IncomingBlocks(max_pulls)
        self._retrievals: dict[int, _Retrieval] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def num_retrieving(self) -> int:
        return len(self._retrievals)

    @property
    def num_queued(self) -> int:
        return self._loads.num_waiting

    async def stop(self) -> None:
        for leg in list(self._retrievals):
            self.abort(leg)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=1.0)

    def begin(self, job: DecodeJob) -> None:
        self._retrievals[job.leg] = _Retrieval(job, job.first_token)
        is_early = job.first_token is None
        source = None if is_early else (job.ticket.instance_id, job.ticket.incarnation)
        ranges, num_bytes = (job.landing.offset,), job.ticket.kv_bytes
        self._tell(LoadStarted(job.leg, ranges, source, num_bytes, job.deadline_s, is_early))
        if self._loads.is_waiting(job.leg):
            after_s = job.deadline_s + _TICK_S
            asyncio.get_running_loop().call_later(after_s, self._tell, Tick())

    def join(self, leg: int, first_token: int) -> None:
        retrieval = self._retrievals.get(leg)
        if retrieval is not None and retrieval.first_token is None:
            retrieval.first_token = first_token
            self._tell(FirstTokenKnown(leg))

    def abort(self, leg: int) -> None:
        """Drop the leg's KV.

        If a pull runs, cancel it. The agent frees the pull's landing later.
        """
        retrieval = self._retrievals.get(leg)
        if retrieval is not None and retrieval.is_complete:  # its KV is being read
            self._release(leg)
        elif retrieval is not None:
            self._tell(LoadCancelled(leg))

    def free_landing(self, offset: int) -> None:
        """Note that no late write can reach the range at `offset` any more."""
        self._tell(AgentLandingFreed(offset))

    # -- effects ----------------------------------------------------------------------------------

    def _tell(self, event: IncomingEvent) -> None:
        for effect in self._loads.handle(event, time.monotonic()):
            self._do(effect)

    def _do(self, effect: IncomingEffect) -> None:
        match effect:
            case StartPull(leg, awaits_prefill):
                self._start(self._retrievals[leg], awaits_prefill)
            case CancelPull(leg):
                pull = self._retrievals[leg].pull
                assert pull is not None, "it was started"
                pull.cancel()
            case KeepLease(leg):
                self._spawn(self._keep(self._retrievals[leg].job), f"keep-{leg}")
            case StopRenewing(leg):
                self._agent.stop_renewing(self._retrievals[leg].job.ticket.ticket_id)
            case BoundSilence(leg):
                job = self._retrievals[leg].job
                self._agent.expect(job.ticket.ticket_id, job.stall_s)
            case ReportLoad():
                self._report(effect)
            case CompleteLoad(leg):
                self._retrievals[leg].is_complete = True
                self._join_if_read(self._retrievals[leg])
            case ReleaseBlocks(leg):
                self._release(leg)
            case FreeLanding(leg):
                self._emit(LandingFreed(leg))

    def _start(self, retrieval: _Retrieval, awaits_prefill: bool) -> None:
        job, params = retrieval.job, self._memory.model.params
        self._emit(KvPulling(job.leg))
        # Admission has reserved blocks for this many tokens.
        last = min(len(job.prompt) + 1 + job.sampling.max_tokens, params.max_model_len)
        retrieval.blocks = self._pool.allocate(-(-last // params.block_size))
        pull = self._spawn(self._pull(retrieval, awaits_prefill), f"pull-{job.leg}")
        pull.add_done_callback(lambda done: self._on_pull_done(retrieval, done))
        retrieval.pull = pull

    async def _pull(self, retrieval: _Retrieval, awaits_prefill: bool) -> LoadFailure | None:
        job, blocks = retrieval.job, self._prompt_blocks(retrieval)
        retrieval.has_landing = False  # if the pull fails, the agent reports when the range is free
        try:
            await self._agent.pull(
                job.ticket,
                job.landing,
                deadline_s=job.deadline_s,
                stall_s=math.inf if awaits_prefill else job.stall_s,
                on_silent=lambda: self._tell(PullFellSilent(job.leg)),
                on_range=lambda offset, data: self._land(retrieval, offset, in_host(data), blocks),
            )
            retrieval.has_landing = True
            if retrieval.scattered is not None:
                await retrieval.scattered
        except KvTransferFailed as exc:
            return LoadFailure(exc.reason, exc.message)
        finally:
            retrieval.slices.clear()  # after a failure, the range belongs to the agent
        if failpoints.hit("decode.pulled") == "zero-kv":
            for cache in self._memory.caches:
                cache[blocks] = 0
        return None

    def _on_pull_done(self, retrieval: _Retrieval, pull: asyncio.Task[LoadFailure | None]) -> None:
        job = retrieval.job
        if pull.cancelled():
            failure: LoadFailure | None = LoadFailure(PullFailure.CLOSING, "it was cancelled")
        elif pull.exception() is not None:
            return  # `watched` reports this error, which ends the engine
        else:
            failure = pull.result()
        landings = (job.landing.offset,) if retrieval.has_landing else ()
        self._tell(PullEnded(job.leg, failure, landings))

    def _land(self, retrieval: _Retrieval, offset: int, data: ByteArray, blocks: list[int]) -> None:
        """Scatter a verified range, slice by slice, while the pull of the next ranges continues."""
        block_bytes = self._memory.model.params.block_bytes
        step = max(1, _SLICE_BYTES // block_bytes) * block_bytes
        for at in range(0, data.size, step):
            retrieval.slices.append((offset + at, data[at : at + step]))
        if retrieval.scattered is None or retrieval.scattered.done():
            retrieval.scattered = asyncio.get_running_loop().create_future()
            self._scatter_next(retrieval, retrieval.scattered, blocks)
        failpoints.hit("decode.range")

    def _scatter_next(
        self, retrieval: _Retrieval, done: asyncio.Future[None], blocks: list[int]
    ) -> None:
        """Scatter one slice now, and the others in the next turns of the loop."""
        try:
            if retrieval.slices:
                self._scatter(retrieval.job.leg, *retrieval.slices.popleft(), blocks)
        except Exception as error:  # noqa: BLE001  the pull raises it, which crashes the engine
            retrieval.slices.clear()
            if not done.done():
                done.set_exception(error)
        if retrieval.slices:
            loop = asyncio.get_running_loop()
            loop.call_soon(self._scatter_next, retrieval, done, blocks)
        elif not done.done():
            done.set_result(None)

    def _scatter(self, leg: int, offset: int, data: ByteArray, blocks: list[int]) -> None:
        for _ in self._loads.handle(RangeVerified(leg), time.monotonic()):
            try:
                self._memory.blocks.scatter_part(data, offset, blocks)
            finally:
                self._tell(RangeScattered(leg))

    async def _keep(self, job: DecodeJob) -> None:
        """Renew the lease of the ticket, the right to pull the KV, until the leg's pull begins.

        A failure is ignored, because the pull will report it.
        """
        with contextlib.suppress(KvTransferFailed):
            await self._agent.keep(job.ticket, job.deadline_s)

    def _report(self, report: ReportLoad) -> None:
        leg, failure = report.leg, report.failure
        if failure is not None:
            why = f"{failure.reason}: {failure.message}"
            general = KvTransferFailed.default_reason
            self._emit(Failed(leg, general, why, cause=failure.reason))
            return
        retrieval = self._retrievals[leg]
        num_bytes = retrieval.job.ticket.kv_bytes
        self._emit(KvReceived(leg, num_bytes, report.duration_s, waited_s=report.waited_s))
        if num_bytes <= _QUICK_BYTES:
            retrieval.digest = self._digest(retrieval)
        else:
            self._spawn(self._read_aside(retrieval), f"read-{leg}")

    async def _read_aside(self, retrieval: _Retrieval) -> None:
        """Compute the digest in a thread, so that running sequences continue (S52)."""
        retrieval.digest = await asyncio.to_thread(self._digest, retrieval)
        if self._retrievals.get(retrieval.job.leg) is retrieval:
            self._join_if_read(retrieval)

    def _digest(self, retrieval: _Retrieval) -> int:
        return self._memory.digest(self._prompt_blocks(retrieval), len(retrieval.job.prompt))

    def _prompt_blocks(self, retrieval: _Retrieval) -> list[int]:
        size = self._memory.model.params.block_size
        return retrieval.blocks[: -(-len(retrieval.job.prompt) // size)]

    def _join_if_read(self, retrieval: _Retrieval) -> None:
        job, first, digest = retrieval.job, retrieval.first_token, retrieval.digest
        if not retrieval.is_complete or first is None or digest is None:
            return
        del self._retrievals[job.leg]
        tokens = tokens_of(job.prompt, job.images)
        state = self._memory.model.last_state(tokens, shift_of(job.adapter))
        self._on_retrieved(Retrieved(job, first, retrieval.blocks, state, digest))

    def _release(self, leg: int) -> None:
        self._pool.release(self._retrievals.pop(leg).blocks)

    def _spawn(self, work: Coroutine[None, None, T], name: str) -> asyncio.Task[T]:
        task = watched(work, name, self._die)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
