"""Simulates one instance on the virtual clock.

It has the product's admission core, and a block pool as its cache. A law gives the time of each
step. A step computes the same as a step of the sim engine: a chunk of the prompts in order of
arrival, and one token for each running sequence. While no prompt is computed, all decode steps
until the next sequence ends are summed in closed form.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from loadtests.sim.clock import Clock
from loadtests.sim.host_pools import HostPools
from loadtests.traffic.workloads import block_name
from pdmesh.core.instance.admission import (
    Admission,
    Admitted,
    Ask,
    Refused,
    Work,
)
from pdmesh.core.instance.step_time_law import Law
from pdmesh.engine.sim.block_pool import BlockPool


@dataclass(slots=True)
class Job:
    """A request's leg (its stay) on this worker.

    `on_first` is called when the prompt is computed. `on_end` is called when all `num_output`
    tokens are drawn.
    """

    leg: int
    request_id: str
    num_prompt: int
    num_output: int
    hashes: Sequence[bytes]
    on_first: Callable[[], None]
    on_end: Callable[[], None]
    blocks: list[int] = field(default_factory=list)
    num_cached: int = 0
    num_computed: int = 0
    began_at: float = 0.0
    in_chunk: int = 0
    seconds: float = 0.0  # the job's shares of the steps that computed its prompt

    @property
    def num_left(self) -> int:
        return self.num_prompt - self.num_cached - self.num_computed


@dataclass(slots=True)
class Worker:
    """One simulated instance. `work` is PREFILL, DECODE or LOCAL (both).

    Times are in seconds of the clock.
    """

    instance_id: str
    work: Work
    clock: Clock
    law: Law
    admission: Admission
    chunk_tokens: int
    on_computed: Callable[[Worker, Job, float], None]
    on_blocks: Callable[[Worker], None]
    host_pools: HostPools
    pool: BlockPool = field(init=False)
    num_prompts: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_chunk_tokens: int = 0  # computed prompt tokens
    num_padded_tokens: int = 0  # padding that was computed, if the engine pads
    is_dead: bool = False
    _prompts: dict[int, Job] = field(default_factory=dict)
    _ends: list[tuple[int, int]] = field(default_factory=list)  # (step at which a leg ends, leg)
    _running: dict[int, Job] = field(default_factory=dict)
    _step: int = 0
    _num_context: int = 0
    _is_stepping: bool = False
    _epoch: int = 0  # number of the planned step; a job that joins makes a new plan
    _span_began: float = 0.0
    _span_step_s: float = 0.0  # time per step while several steps of decoding only are planned

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.admission.capacity.num_blocks)

    def offer(self, job: Job) -> Admitted | Refused:
        """Accept the job now, or return why not. A decode then waits for the KV until `begin`."""
        ask = Ask(job.leg, self.work, job.num_prompt, job.num_output, 1e9)
        answer = self.admission.admit(ask, self.clock.now)
        if isinstance(answer, Admitted) and self.work is not Work.DECODE:
            self.begin(job)
        return answer

    def begin(self, job: Job) -> None:
        job.began_at = self.clock.now
        num_blocks = -(-job.num_prompt // self.block_size)
        if self.work is Work.DECODE:
            job.blocks = self.pool.allocate(num_blocks)
            self._join(job)
            return
        job.blocks = self.pool.match(job.hashes)
        num_loaded, load_s = self.host_pools.load(
            self.instance_id, job.hashes, first=len(job.blocks)
        )
        num_held = len(job.blocks) + num_loaded
        job.num_cached = min(num_held * self.block_size, job.num_prompt - 1)
        job.blocks += self.pool.allocate(num_blocks - len(job.blocks))
        self.num_prompts += 1
        self.num_prompt_tokens += job.num_prompt
        self.num_cached_tokens += job.num_cached
        if num_loaded:
            self.clock.after(load_s, lambda: self._loaded(job, num_held))
        else:
            self._enter(job)

    def _loaded(self, job: Job, num_held: int) -> None:
        self._keep(job, num_held)
        self._enter(job)

    def _keep(self, job: Job, num_blocks: int) -> None:
        """Keep the first blocks of the job's prompt in the cache, and a copy in the host pool."""
        hashes = job.hashes[:num_blocks]
        for block, block_hash in zip(job.blocks, hashes, strict=False):
            self.pool.store(block, block_hash)
        self.host_pools.store(self.instance_id, hashes)
        self.on_blocks(self)

    def _enter(self, job: Job) -> None:
        self._prompts[job.leg] = job
        self._interrupt()

    @property
    def block_size(self) -> int:
        return self.admission.capacity.block_size

    # --- steps -----------------------------------------------------------------------------------

    def _interrupt(self) -> None:
        """Let a new job join. Planned steps of pure decoding end with the step under way."""
        if not self._is_stepping:
            self._is_stepping = True
            self._epoch += 1
            epoch = self._epoch
            self.clock.after(0.0, lambda: self._next(epoch))
        elif self._span_step_s > 0:
            self._cut_span()

    def _cut_span(self) -> None:
        """Plan the steps again. The new job takes part after the step under way."""
        elapsed = self.clock.now - self._span_began
        num_steps = math.floor(elapsed / self._span_step_s) + 1
        until = self._span_began + num_steps * self._span_step_s
        self._span_step_s = 0.0
        self._epoch += 1
        epoch = self._epoch
        self.clock.at(until, lambda: self._stepped(epoch, num_steps))

    def _advance(self, num_steps: int) -> None:
        if self._ends:
            num_steps = min(num_steps, max(0, self._ends[0][0] - self._step))
        self._step += num_steps
        self._num_context += num_steps * len(self._running)

    def _next(self, epoch: int) -> None:
        if epoch != self._epoch:
            return
        self._finish_ends()
        budget, pairs, batch, longest = self.chunk_tokens, 0, 0, 0
        for job in self._prompts.values():
            job.in_chunk = min(budget, job.num_left)
            if job.in_chunk == 0:
                break
            budget -= job.in_chunk
            pairs += job.num_cached + job.num_computed
            batch += 1
            longest = max(longest, job.in_chunk)
        running = len(self._running)
        if batch:
            num_tokens = self.chunk_tokens - budget
            self.num_chunk_tokens += num_tokens
            self.num_padded_tokens += batch * longest - num_tokens
            duration = self.law.prefill_s(num_tokens, pairs // batch, batch, longest)
            duration = self.law.mixed_s(duration, running, self._num_context)
            for job in self._prompts.values():
                job.seconds += duration * job.in_chunk / num_tokens
            self._plan(duration, 1)
        elif running:
            steps = max(1, self._ends[0][0] - self._step)
            context = self._num_context + running * steps // 2
            step_s = self.law.step_s(running, context)
            self._plan(steps * step_s, steps)
            self._span_step_s = step_s
        else:
            self._is_stepping = False

    def _plan(self, duration: float, num_steps: int) -> None:
        self._epoch += 1
        epoch = self._epoch
        self._span_began, self._span_step_s = self.clock.now, 0.0
        self.clock.after(duration, lambda: self._stepped(epoch, num_steps))

    def _stepped(self, epoch: int, num_steps: int) -> None:
        if epoch != self._epoch:
            return
        self._span_step_s = 0.0
        if self._running:
            self._advance(num_steps)
        for job in list(self._prompts.values()):
            if job.in_chunk == 0:
                break
            job.num_computed += job.in_chunk
            job.in_chunk = 0
            if job.num_left == 0:
                del self._prompts[job.leg]
                self._computed(job)
        self._next(self._epoch)

    def _computed(self, job: Job) -> None:
        self._keep(job, len(job.hashes))
        if self.work is Work.PREFILL:  # the KV is staged, so the engine's blocks are free
            self.admission.computed(job.leg)
            self.pool.release(job.blocks)
            job.blocks = []
        self.on_computed(self, job, job.seconds)
        job.on_first()
        if self.work is Work.LOCAL:
            self._join(job)

    def _join(self, job: Job) -> None:
        self._running[job.leg] = job
        self._num_context += job.num_prompt
        heapq.heappush(self._ends, (self._step + max(1, job.num_output - 1), job.leg))
        self._interrupt()

    def _finish_ends(self) -> None:
        while self._ends and self._ends[0][0] <= self._step:
            _, leg = heapq.heappop(self._ends)
            job = self._running.pop(leg)
            self._num_context -= job.num_prompt + max(1, job.num_output - 1)
            if self.work is Work.LOCAL:
                self._keep_answer(job)
            self.pool.release(job.blocks)
            self.on_blocks(self)
            self.admission.ended(leg, self.clock.now)
            self.admission.range_freed(leg, self.clock.now)
            job.on_end()
        if not self._running:
            self._num_context = 0

    def _keep_answer(self, job: Job) -> None:
        """Keep the answer's full blocks in the cache, as an engine does.

        No request asks for these blocks. They only take space.
        """
        total = (job.num_prompt + job.num_output) // self.block_size
        new = max(0, total - len(job.blocks))
        job.blocks += self.pool.allocate(min(new, self.pool.num_free))
        first = job.num_prompt // self.block_size
        for part, block in enumerate(job.blocks[first:total]):
            self.pool.store(block, block_name(-job.leg - 1_000_000, part))

    def release(self, job: Job) -> None:
        """Free the prefill's slot, because a decode has pulled the staged KV (S41)."""
        self.pool.release(job.blocks)
        self.on_blocks(self)
        self.admission.ended(job.leg, self.clock.now)
        self.admission.range_freed(job.leg, self.clock.now)

    def abort(self, job: Job) -> None:
        """End a job that the gateway no longer wants."""
        self._prompts.pop(job.leg, None)
        if self._running.pop(job.leg, None) is not None:
            (end,) = (step for step, leg in self._ends if leg == job.leg)
            self._ends = [entry for entry in self._ends if entry[1] != job.leg]
            heapq.heapify(self._ends)
            self._num_context -= job.num_prompt + max(1, job.num_output - 1) - (end - self._step)
        self.release(job)

    def kill(self) -> None:
        """Let the worker die. Nothing that is planned happens any more."""
        self.is_dead = True
        self._epoch += 1
        self._is_stepping = True
        self._prompts.clear()
        self._running.clear()
        self._ends.clear()
