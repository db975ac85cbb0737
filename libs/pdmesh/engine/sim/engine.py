"""The simulated engine, for tests and trials without a GPU or a model.

It moves real KV bytes over the real transport. The sim model draws the tokens, and a formula gives
the time of each step. One loop runs steps, as in a continuous-batching engine: ready requests join
the step, the engine sleeps for the step's time, every running sequence draws a token, and the
step's chunk of the prompts counts as computed. Pulls run beside the loop, and a pulled sequence
joins the next step (S52).

A leg is a request's stay on this engine. A ticket is the right to pull a prompt's staged KV. A
guide is the compiled constraint of an answer.
"""

from __future__ import annotations

import asyncio
import math
import random
from array import array
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

from pdmesh import failpoints
from pdmesh.core.adapters.fit import AdapterFacts
from pdmesh.core.instance.urgency import DEFAULT_PRIORITY, SchedulingPolicy, Urgency
from pdmesh.core.kv.prefix.pins import PinnedPrefix
from pdmesh.engine.base import (
    BlocksChanged,
    DecodeJob,
    EngineInfo,
    EngineStats,
    Failed,
    Finished,
    FinishReason,
    KvPeer,
    Output,
    Prefetch,
    Prefilled,
    PrefillJob,
    Sampling,
    SessionHint,
    TicketClosed,
    TicketOpened,
    TokenBatch,
    constraint_failed,
)
from pdmesh.engine.sim.adapter_queue import AdapterQueue
from pdmesh.engine.sim.batch import DecodeBatch, Running
from pdmesh.engine.sim.block_pool import BlockPool
from pdmesh.engine.sim.config import SimConfig
from pdmesh.engine.sim.constraints.draws import guided_vocabulary
from pdmesh.engine.sim.constraints.guide_queue import GuideQueue
from pdmesh.engine.sim.encoding.embedding_queue import EmbeddingQueue
from pdmesh.engine.sim.kept_kv import keep_answer
from pdmesh.engine.sim.memory import PagedMemory, SimKv
from pdmesh.engine.sim.model import SimModel, draw_key, shift_of, tokens_of
from pdmesh.engine.sim.prefill_queue import PrefillQueue, PromptUnderWay
from pdmesh.engine.sim.retrieval import Retrieved, Retriever
from pdmesh.engine.sim.staging import Stager
from pdmesh.engine.sim.tier_queue import FetchedBlocks, TierQueue
from pdmesh.engine.sim.vocabulary import EOS_ID
from pdmesh.errors import EngineFailed, KvFormatMismatch
from pdmesh.kv.agent import types as kv_events
from pdmesh.kv.agent.agent import KvAgent
from pdmesh.kv.agent.types import AgentEvent
from pdmesh.kv.tiers.peers import AgentPeers, FindHolders
from pdmesh.kv.tiers.stack import TierStack
from pdmesh.net.tasks import watched

_SIGN_S: Final = 0.1  # in a long step, `num_signs` grows at this interval; in vLLM, once per layer

AgentFactory = Callable[[Callable[[AgentEvent], None]], KvAgent]


@dataclass(slots=True)
class _Sequence:
    """A sequence that decodes here.

    `first` is token 1. `kept` is the sequence's job if the answer's KV blocks are to be cached.
    """

    blocks: list[int]
    first: int
    kept: PrefillJob | DecodeJob | None = None


class SimEngine:
    """See `pdmesh.engine.base.Engine`.

    `make_agent` is called with the handler of the KV agent's events.
    """

    def __init__(
        self,
        config: SimConfig,
        make_agent: AgentFactory,
        tiers: TierStack | None = None,
        find_holders: FindHolders | None = None,
    ) -> None:
        self._config = config
        self._model = SimModel(config.params)
        self._memory = PagedMemory(self._model, config.num_kv_blocks)
        self._pool = BlockPool(config.num_kv_blocks)
        self._prompts = PrefillQueue(config.chunk_tokens)
        self._batch = DecodeBatch(self._model, config.num_slots)
        self._agent = make_agent(self._on_agent_event)
        self._stager = Stager(config, self._memory, self._agent)
        kv = SimKv(self._memory, self._pool)
        self._retriever = Retriever(
            kv, self._agent, config.max_pulls, self._emit, self._on_retrieved, self._die
        )
        self._tiers: TierQueue | None = None
        if tiers is not None:
            if find_holders is not None:
                tiers.peers = AgentPeers(self._agent.fetch, config.tier_timeout_s, tiers.counts)
            source = FetchedBlocks(tiers, config.tier_timeout_s, find_holders)
            self._tiers = TierQueue(source, kv, self._emit, self._arrive, self._die)
        self._adapters = AdapterQueue(config, self._go, self._give_up, self._emit, self._die)
        self._embeddings = EmbeddingQueue(
            self._agent, self._proceed, self._give_up, self._emit, self._die
        )
        self._guides = GuideQueue(self._on_refused, self._die)
        self._unguided: dict[int, PrefillJob] = {}  # prompts whose constraints are being compiled
        self._held: dict[int, Retrieved] = {}  # pulled sequences that wait for their guides
        self._arrivals: dict[int, PrefillJob] = {}
        self._sequences: dict[int, _Sequence] = {}
        self._joining: dict[int, Running] = {}
        self._random = random.Random()
        self._num_fetched: dict[int, int] = {}  # by leg: images with fetched embeddings
        self._num_prompts = 0
        self._num_signs = self._num_tokens = 0
        self._work, self._has_output = asyncio.Event(), asyncio.Event()
        self._outputs: list[Output] = []
        self._pings: list[asyncio.Future[None]] = []
        self._loop: asyncio.Task[None] | None = None
        self._error: BaseException | None = None

    async def start(self) -> EngineInfo:
        self._stager.address = await self._agent.start()
        self._loop = watched(self._run(), "sim-engine", self._die)
        if self._tiers is not None:
            self._tiers.start()
        config, params = self._config, self._config.params
        return EngineInfo(
            engine="sim",
            model=config.model,
            model_fingerprint=config.model_fingerprint,
            block_size=params.block_size,
            num_kv_blocks=config.num_kv_blocks,
            kv_bytes_per_token=params.num_layers * params.token_bytes,
            max_model_len=params.max_model_len,
            supports_constraints=True,
            unsupported_shaping=("thinking_token_budget",),  # the sim model does not reason
            kv_addresses=(self._stager.address,),
            max_adapters=config.max_adapters,
            images=config.images,
            fetches_embeddings=config.images is not None,
        )

    async def stop(self) -> None:
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.wait([self._loop], timeout=1.0)
        await self._retriever.stop()
        if self._tiers is not None:
            await self._tiers.stop()
        await self._adapters.stop()
        await self._embeddings.stop()
        await self._agent.close()

    def prefill(self, job: PrefillJob) -> None:
        failpoints.hit("prefill.accepted")
        if self._stager.is_per_layer(job):
            self._emit(TicketOpened(job.leg, self._stager.open(job)))
        if job.awaits_embeddings:
            self._embeddings.expect(job.leg)
        if self._is_to_fail():
            self._give_up(job)
            why = f"one prompt in {self._config.fail_every} fails (sim_fail_every)"
            self._emit(Failed(job.leg, EngineFailed.default_reason, why))
        elif job.adapter is not None:
            self._adapters.begin(job)
        else:
            self._go(job)

    def _go(self, job: PrefillJob | DecodeJob) -> None:
        """Continue with a job that has its adapter, or needs none."""
        constraint = job.sampling.constraint
        if isinstance(job, PrefillJob):
            if constraint is None:
                self._begin(job)
                return
            self._unguided[job.leg] = job
            self._guides.prepare(job.leg, job.sampling, _drawn(job.prompt, job.sampling))
            self._guides.when_ready(job.leg, lambda: self._begin(self._unguided.pop(job.leg)))
            return
        if constraint is not None:
            drawn = _drawn(job.prompt, job.sampling, num_to_come=1)
            self._guides.prepare(job.leg, job.sampling, drawn)
        self._retriever.begin(job)
        if (token := self._adapters.first_token(job.leg)) is not None:
            self._retriever.join(job.leg, token)

    def _begin(self, job: PrefillJob) -> None:
        if job.leg in self._embeddings:
            self._embeddings.begin(job)
        else:
            self._proceed(job)

    def _proceed(self, job: PrefillJob, num_fetched: int = 0) -> None:
        """Continue with a job whose wait for embeddings is over.

        The embeddings of the first `num_fetched` images are here. The engine encodes the other
        images.
        """
        if num_fetched:
            self._num_fetched[job.leg] = num_fetched
        if self._tiers is None or not self._tiers.begin(job):
            self._arrive(job)

    def _give_up(self, job: PrefillJob) -> None:
        """Clean up after a job that failed before token 1. Close its ticket, if it is open."""
        self._embeddings.abort(job.leg)
        self._num_fetched.pop(job.leg, None)
        if self._stager.is_per_layer(job):
            self._stager.release(job.ticket_id)

    def _is_to_fail(self) -> bool:
        every = self._config.fail_every
        self._num_prompts += 1
        return every > 0 and self._num_prompts % every == 0

    def _arrive(self, job: PrefillJob) -> None:
        self._arrivals[job.leg] = job
        self._work.set()

    def decode(self, job: DecodeJob) -> None:
        failpoints.hit("decode.accepted")
        if job.adapter is not None:
            self._adapters.begin(job)
        else:
            self._go(job)

    def join(self, leg: int, first_token: int) -> None:
        if not self._adapters.join(leg, first_token):
            self._retriever.join(leg, first_token)

    def embedded(self, leg: int, encoder: KvPeer | None) -> None:
        self._embeddings.tell(leg, encoder)

    def abort(self, leg: int) -> None:
        self._num_fetched.pop(leg, None)
        prompt = self._prompts.remove(leg)
        if prompt is not None:
            self._pool.release(prompt.blocks)
        fetching = self._tiers.abort(leg) if self._tiers is not None else None
        self._guides.abort(leg)
        if (held := self._held.pop(leg, None)) is not None:
            self._pool.release(held.blocks)
        unguided = self._unguided.pop(leg, None)
        waiting = self._adapters.abort(leg) or self._embeddings.abort(leg)
        job = (
            self._arrivals.pop(leg, None)
            or (prompt.job if prompt else fetching)
            or waiting
            or unguided
        )
        if job is not None and job.staging is not None and not self._stager.is_per_layer(job):
            self._emit(TicketClosed(job.ticket_id, "released"))  # no KV was staged yet
        self._stager.release_leg(leg)
        self._retriever.abort(leg)
        self._leave(leg)

    def release(self, ticket_id: str) -> None:
        self._stager.release(ticket_id)

    async def verify_peer(self, peer: KvPeer, timeout_s: float) -> None:
        address, *others = peer.addresses
        if others:
            raise KvFormatMismatch(f"{peer.instance_id} has {1 + len(others)} ranks, the sim has 1")
        await self._agent.probe(
            address, peer.incarnation, deadline_s=timeout_s, source=peer.instance_id
        )

    def forget_peer(self, peer: KvPeer) -> None:
        for address in peer.addresses:
            self._agent.disconnect(address)

    def pin(self, prefixes: Sequence[PinnedPrefix]) -> None:
        if self._tiers is not None:
            self._tiers.stack.pin(prefixes)

    def note_session(self, hint: SessionHint) -> None:
        if self._tiers is not None:
            self._tiers.note_session(hint)

    def prefetch(self, wanted: Prefetch) -> None:
        if self._tiers is not None:
            self._tiers.prefetch(wanted)

    async def inspect_adapter(self, path: str) -> AdapterFacts:
        return await self._adapters.inspect(path)

    def keep_adapters(self, digests: Collection[str]) -> None:
        self._adapters.keep(digests)

    async def outputs(self) -> AsyncIterator[list[Output]]:
        while True:
            await self._has_output.wait()
            if self._error is not None:
                raise EngineFailed("the sim engine died") from self._error
            batch, self._outputs = self._outputs, []
            self._has_output.clear()
            yield batch

    async def ping(self) -> None:
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pings.append(answer)
        self._work.set()
        await answer

    def stats(self) -> EngineStats:
        running = len(self._arrivals) + len(self._prompts) + len(self._sequences)
        running += len(self._unguided) + len(self._held)
        running += self._tiers.num_waiting if self._tiers is not None else 0
        running += self._adapters.num_waiting + self._embeddings.num_waiting
        return EngineStats(
            num_running=running + self._retriever.num_retrieving,
            num_kv_blocks_free=self._pool.num_free,
            num_signs=self._num_signs + self._adapters.num_signs + self._embeddings.num_signs,
            num_tokens=self._num_tokens,
            avoided_encoders=self._embeddings.avoided,
            extra={
                "num_retrieving": self._retriever.num_retrieving,
                "num_pulls_queued": self._retriever.num_queued,
                "num_tickets": len(self._stager),
                "num_kv_connections": self._agent.stats().num_peers,
                **self._embeddings.numbers(),
            },
        )

    def check_idle(self) -> None:
        """Assert that all jobs freed everything. Tests call this when no job is left."""
        self._pool.check_invariants()
        held = (
            self._arrivals,
            self._sequences,
            self._joining,
            self._stager,
            self._prompts,
            self._batch,
        )
        guided = self._guides, self._unguided, self._held
        assert not any(len(part) for part in (*held, *guided))
        assert self._pool.num_free == self._config.num_kv_blocks
        assert self._retriever.num_retrieving == 0
        assert self._tiers is None or self._tiers.is_idle
        assert self._adapters.is_idle
        assert self._embeddings.is_idle
        assert not self._num_fetched

    # -- one step ---------------------------------------------------------------------------------

    async def _run(self) -> None:
        law = self._config.law
        while True:
            if failpoints.hit("engine.step") == "hang":
                await asyncio.Event().wait()
            self._answer_pings()
            if not (self._arrivals or self._joining or len(self._prompts) or len(self._batch)):
                self._work.clear()
                await self._work.wait()
                continue
            num_to_encode = self._take_arrivals()
            chunk = self._prompts.next_chunk()
            batch = len(self._batch)
            duration = law.prefill_s(chunk.num_tokens, chunk.num_before, chunk.batch, chunk.longest)
            duration += law.prefill_s(num_to_encode)
            duration = law.mixed_s(duration, batch, self._batch.num_context if batch else 0)
            self._num_tokens += chunk.num_tokens + batch
            await self._wait_out(duration)
            if chunk.num_tokens:
                failpoints.hit("prefill.computing")
            if len(self._batch):
                self._draw()
            for prompt in self._prompts.finish_chunk():
                self._complete(prompt)
            self._emit_block_changes()

    def _answer_pings(self) -> None:
        for answer in self._pings:
            if not answer.done():
                answer.set_result(None)
        self._pings.clear()

    async def _wait_out(self, duration: float) -> None:
        """Wait for the time of a step.

        If a prompt is handed on per layer, its layers are staged one by one, after equal shares of
        this time.
        """
        prompts = [p for p in self._prompts.in_chunk() if self._stager.is_per_layer(p.job)]
        if not prompts:
            await self._compute(duration)
            return
        num_layers = self._config.params.num_layers
        for layer in range(num_layers):
            await self._compute(duration / num_layers)
            for prompt in prompts:
                # The blocks of an aborted prompt may belong to another prompt now.
                if prompt in self._prompts:
                    self._stager.put(prompt, layer)

    async def _compute(self, duration: float) -> None:
        num_parts = max(1, math.ceil(duration / _SIGN_S))
        for _ in range(num_parts):
            await asyncio.sleep(duration / num_parts)
            self._num_signs += 1

    def _take_arrivals(self) -> int:
        """Put arrived prompts in the queue, and ready sequences in the batch.

        Returns the number of image tokens that this step encodes for the arrived prompts.
        """
        num_to_encode = 0
        for job in self._arrivals.values():
            # The last token is computed even if its block is cached: the first draw needs it.
            size = self._config.params.block_size
            blocks = self._pool.match(job.block_hashes[: (len(job.prompt) - 1) // size])
            if self._tiers is not None:
                blocks += self._tiers.load(job, len(blocks))
            num_cached = len(blocks) * size
            blocks += self._pool.allocate(-(-len(job.prompt) // size) - len(blocks))
            self._prompts.add(PromptUnderWay(job, blocks, num_cached, self._urgency(job)))
            images = job.images[self._num_fetched.pop(job.leg, 0) :]
            num_to_encode += sum(image.num_tokens for image in images if image.end > num_cached)
        self._arrivals.clear()
        # A ready sequence takes the slot of a sequence that ended in the last step (S53).
        while self._joining and len(self._batch) < self._config.num_slots:
            leg = next(iter(self._joining))
            self._batch.join(self._joining.pop(leg))
        return num_to_encode

    def _urgency(self, job: PrefillJob) -> Urgency:
        is_fcfs = self._config.scheduling_policy is SchedulingPolicy.FCFS
        now = asyncio.get_running_loop().time()
        return Urgency(DEFAULT_PRIORITY if is_fcfs else job.priority, now)

    def _draw(self) -> None:
        failpoints.hit("decode.token")
        step = self._batch.step()
        self._emit(TokenBatch(*step.drawn))
        for leg, reason in step.finished:
            self._leave(leg)
            self._emit(Finished(leg, reason))
        for leg in step.failed:
            self._leave(leg)
            self._emit(constraint_failed(leg))

    def _complete(self, prompt: PromptUnderWay) -> None:
        """Write the prompt's KV, draw token 1 from its bytes, and stage the KV or decode here."""
        job, blocks = prompt.job, prompt.blocks
        num_tokens = len(job.prompt)
        tokens = tokens_of(job.prompt, job.images)
        states = self._model.states(tokens, shift_of(job.adapter))
        if prompt.states is None:  # if not None, `Stager.put` has written the layers
            self._memory.write(blocks, states, prompt.num_cached)
        for block, block_hash in zip(blocks, job.block_hashes, strict=False):
            self._pool.store(block, block_hash)
        if self._tiers is not None and job.cache_salt:
            self._tiers.save(job.cache_salt, job.block_hashes, blocks)
        digest = self._memory.digest(blocks, num_tokens)
        sampling = job.sampling
        key = draw_key(sampling, self._random.getrandbits(64))
        may_end = not sampling.ignore_eos and _min_left(sampling) == 0
        token = self._model.draw_one(digest, key, job.prompt[-1], may_end)
        if (guide := self._guides.take(job.leg)) is not None:
            try:
                token = guided_vocabulary().draw_next(guide, token, digest + key, may_end)
            except EngineFailed:
                self._pool.release(blocks)
                self._give_up(job)
                self._emit(constraint_failed(job.leg))
                return
        reason = self._first_finish(job, token)
        ticket = None
        if reason is None and job.staging is not None:
            ticket = self._stager.complete(job, blocks)
        elif job.staging is not None:
            self._stager.release(job.ticket_id)  # token 1 ended the answer, so no decode will pull
        self._emit(Prefilled(job.leg, token, ticket, prompt.num_cached, reason))
        if reason is None and ticket is None:
            running = Running(
                job.leg,
                int(states[-1]),
                digest,
                num_tokens,
                token,
                key,
                sampling.max_tokens - 1,
                sampling.ignore_eos,
                sampling.stop_token_ids,
                max(0, _min_left(sampling) - 1),
                guide,
            )
            self._add(running, _Sequence(blocks, token, job))
        else:
            self._pool.release(blocks)

    def _first_finish(self, job: PrefillJob, token: int) -> FinishReason | None:
        sampling = job.sampling
        is_stop = token in sampling.stop_token_ids or (token == EOS_ID and not sampling.ignore_eos)
        if is_stop and (_min_left(sampling) == 0 or token == EOS_ID):
            return FinishReason.STOP
        if sampling.max_tokens == 1 or len(job.prompt) + 1 >= self._config.params.max_model_len:
            return FinishReason.LENGTH
        return None

    # -- joining and leaving ----------------------------------------------------------------------

    def _on_retrieved(self, got: Retrieved) -> None:
        leg = got.job.leg
        self._held[leg] = got
        self._guides.when_ready(leg, lambda: self._join(self._held.pop(leg)))

    def _on_refused(self, leg: int) -> None:
        """Fail a leg whose constraint cannot be compiled."""
        if (prompt := self._unguided.pop(leg, None)) is not None:
            self._give_up(prompt)
        if (held := self._held.pop(leg, None)) is not None:
            self._pool.release(held.blocks)
        self._retriever.abort(leg)
        self._emit(constraint_failed(leg))

    def _join(self, got: Retrieved) -> None:
        job, sampling = got.job, got.job.sampling
        key = draw_key(sampling, self._random.getrandbits(64))
        guide = self._guides.take(job.leg)
        if guide is not None and not guide.guide.accept([got.first_token]):
            self._pool.release(got.blocks)
            self._emit(constraint_failed(job.leg))
            return
        running = Running(
            job.leg,
            got.state,
            got.digest,
            len(job.prompt),
            got.first_token,
            key,
            sampling.max_tokens,
            sampling.ignore_eos,
            sampling.stop_token_ids,
            _min_left(sampling),
            guide,
        )
        kept = job if self._tiers is not None else None
        self._add(running, _Sequence(got.blocks, got.first_token, kept))

    def _add(self, running: Running, sequence: _Sequence) -> None:
        self._sequences[running.leg] = sequence
        self._joining[running.leg] = running
        self._work.set()

    def _leave(self, leg: int) -> None:
        sequence = self._sequences.pop(leg, None)
        if sequence is None:
            return
        if self._joining.pop(leg, None) is None:
            drawn = self._batch.leave(leg)
            if sequence.kept is not None:
                answer = [sequence.first, *drawn.tolist()]
                job, blocks = sequence.kept, sequence.blocks
                names = keep_answer(self._memory, self._pool, job, blocks, answer)
                if self._tiers is not None and names:
                    # If the prompt was pulled, its prefill saved the prompt's blocks already.
                    first = len(job.block_hashes) if isinstance(job, DecodeJob) else 0
                    self._tiers.save(job.cache_salt, names, blocks, first)
        self._pool.release(sequence.blocks)

    # -- outputs ----------------------------------------------------------------------------------

    def _emit(self, output: Output) -> None:
        if self._config.max_adapters and isinstance(output, Prefilled | Finished | Failed):
            self._release_adapter(output)
        self._outputs.append(output)
        self._has_output.set()

    def _release_adapter(self, output: Prefilled | Finished | Failed) -> None:
        """Release the job's adapter, unless the job continues here after token 1."""
        is_over = not isinstance(output, Prefilled) or output.finish_reason or output.ticket
        if is_over:
            self._adapters.left(output.leg)

    def _emit_block_changes(self) -> None:
        stored, removed = self._pool.take_changes()
        if stored or removed:
            self._emit(BlocksChanged(stored, removed))

    def _on_agent_event(self, event: AgentEvent) -> None:
        match event:
            case kv_events.AgentTicketClosed(ticket_id, reason):
                if self._stager.closed(ticket_id):
                    self._emit(TicketClosed(ticket_id, reason))
            case kv_events.AgentLandingFreed(offset):
                self._retriever.free_landing(offset)

    def _die(self, error: BaseException) -> None:
        self._error = self._error or error
        self._has_output.set()


def _min_left(sampling: Sampling) -> int:
    """Tokens to draw before a stop token may end the answer."""
    return max(0, sampling.shaping.min_tokens - sampling.num_drawn)


def _drawn(prompt: array[int], sampling: Sampling, num_to_come: int = 0) -> array[int]:
    """The tokens at the prompt's end that belong to the answer.

    The last `num_to_come` drawn tokens are not in the prompt yet.
    """
    num = sampling.num_drawn - num_to_come
    return prompt[-num:] if num > 0 else array("I")
