"""Runs vLLM as the engine of one instance: `VllmEngine` implements `Engine` over vLLM's AsyncLLM.

A job is the instance's order to prefill or decode one request, and becomes one vLLM request.
`Requests` gives these requests to vLLM. `Jobs` turns their outputs, and the workers' reports about
KV, into outputs for the host, which is the part of the instance outside the engine. This module
starts and stops vLLM, and connects these parts.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import AsyncIterator, Collection, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from pdmesh import failpoints
from pdmesh.core.adapters.fit import AdapterFacts
from pdmesh.core.deadlines import PULL_GRACE_S
from pdmesh.core.kv.prefix.pins import PinnedPrefix
from pdmesh.engine.base import (
    ArenaRange,
    DecodeJob,
    EngineInfo,
    EngineStats,
    Failed,
    KvArrived,
    KvPeer,
    KvPulling,
    Output,
    Prefetch,
    PrefillJob,
    SessionHint,
    hands_on,
)
from pdmesh.engine.vllm.child.domain import domain_arguments
from pdmesh.engine.vllm.child.extra_arguments import extra_arguments
from pdmesh.engine.vllm.child.llm_process import START_TIMEOUT_S, LlmProcess
from pdmesh.engine.vllm.child.pipeline import check_pipeline
from pdmesh.engine.vllm.child.preflight import check_memory, check_processor
from pdmesh.engine.vllm.child.private_dir import make_private_dir
from pdmesh.engine.vllm.child.startup import PROGRESS_EVERY_S, vllm_version, with_progress
from pdmesh.engine.vllm.config import (
    VllmConfig,
    control_path,
    engine_arguments,
    environment,
    events_endpoint,
)
from pdmesh.engine.vllm.connector.refusal import read_refusal
from pdmesh.engine.vllm.connector.scheduler.handoff import load_params, store_params
from pdmesh.engine.vllm.connector.worker.peer_checks import PeerChecks
from pdmesh.engine.vllm.encoding.client import EmbeddingClient
from pdmesh.engine.vllm.encoding.config import ec_config, embeddings_path
from pdmesh.engine.vllm.host.adapters import VllmAdapters
from pdmesh.engine.vllm.host.control import ControlServer, WorkerLost
from pdmesh.engine.vllm.host.description import endpoint_of, info_of
from pdmesh.engine.vllm.host.job_facts import (
    CancelRequest,
    Drawn,
    Effect,
    ReleaseAtRanks,
)
from pdmesh.engine.vllm.host.jobs import Endpoint, Jobs
from pdmesh.engine.vllm.host.kv_events import BlockNames, read_events
from pdmesh.engine.vllm.host.outputs import OutputQueue
from pdmesh.engine.vllm.host.requests import RequestEvents, Requests
from pdmesh.engine.vllm.host.stats import SchedulerView
from pdmesh.engine.vllm.host.tier_client import TierClient, outputs_of
from pdmesh.engine.vllm.images.facts import find_facts
from pdmesh.engine.vllm.images.inputs import VllmImages
from pdmesh.engine.vllm.loading.choice import check_weights
from pdmesh.engine.vllm.messages import (
    Connections,
    EmbeddingsFetched,
    EmbeddingsHeld,
    Fetched,
    Join,
    Open,
    Probed,
    RankHello,
    Release,
    TierNews,
    ToHost,
    Working,
)
from pdmesh.engine.vllm.model.file_digests import FileDigests, default_cache_dir
from pdmesh.engine.vllm.model.fingerprint import computation_digest, digest
from pdmesh.engine.vllm.model.model_files import ModelFiles, read_model
from pdmesh.engine.vllm.speculation.methods import check_speculation
from pdmesh.errors import (
    AdapterMisfit,
    AdapterUnusable,
    EngineFailed,
    EngineMisconfigured,
    ImageUnusable,
    MeshError,
)
from pdmesh.kv.tiers.peers import FindHolders
from pdmesh.net.tasks import watched

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

log = structlog.get_logger(__name__)

STAND_IN = 0  # takes the place of token 1 in a decode that starts before the token is known
NAMES_PER_BLOCK = 4  # how many block names are remembered, per block of the cache


class VllmEngine:
    """`pdmesh.engine.base.Engine` describes the methods.

    A process has one engine, started only once.
    """

    def __init__(self, config: VllmConfig, find_holders: FindHolders | None = None) -> None:
        self._config, self._find_holders = config, find_holders
        self._digests = FileDigests(default_cache_dir())
        self._private_dir: Path | None = None
        self._process = LlmProcess()
        self._control: ControlServer | None = None
        self._view = SchedulerView()
        self._names = BlockNames(0, config.block_size)  # the capacity is set in `_open_for_jobs`
        self._tiers: TierClient | None = None
        self._checks: PeerChecks | None = None
        self._jobs: Jobs | None = None
        self._queue = OutputQueue()
        self._requests: Requests | None = None
        self._adapters: VllmAdapters | None = None
        self._embeddings: EmbeddingClient | None = None
        self._deadlines: dict[int, asyncio.TimerHandle] = {}
        self._events: asyncio.Task[None] | None = None
        self._num_blocks = 0
        self._worker_pids: tuple[int, ...] = ()
        self._num_connections: dict[int, int] = {}  # KV connections, by rank
        self._working: dict[int, Working] = {}  # last report, by rank
        self._is_stopping = False

    # -- life -------------------------------------------------------------------------------------

    async def start(self) -> EngineInfo:
        started = time.monotonic()
        config = self._config
        scheduling, loader = config.scheduling, config.loader
        log.info(
            "vllm.starting",
            model=config.model,
            dtype=config.effective_dtype,
            num_ranks=config.num_ranks,
            num_stages=config.pipeline_parallel_size,
            async_scheduling=scheduling.is_async,
            because=scheduling.reason,
            reads_in_file_order=loader.is_file_order,
            loader_because=loader.reason,
        )
        try:
            return await self._start(started)
        except (EngineFailed, asyncio.CancelledError):
            await self.stop()
            raise

    def _read_draft(self) -> ModelFiles | None:
        """The files of speculation's draft model, or None.

        The blocks of KV include the draft's KV, so these files also decide the blocks' names.
        """
        if not (folder := self._config.speculation.model):
            return None
        remedy = "the part `model` of the option `speculation` must name the draft's directory"
        return read_model(Path(folder), self._digests, remedy=remedy)

    async def _start(self, started: float) -> EngineInfo:
        config = self._config
        check_processor(config)
        check_speculation(config.speculation)
        check_pipeline(config)
        await asyncio.to_thread(check_weights, config.loader, config.model_dir)
        files = await asyncio.to_thread(
            read_model, config.model_dir, self._digests, config.file_digests
        )
        draft = await asyncio.to_thread(self._read_draft)
        check_memory(config, draft.folder if draft is not None else None)
        os.environ.update(environment(config, os.environ))
        self._private_dir = make_private_dir()
        self._control = ControlServer(self._on_worker_message, self._on_worker_lost)
        await self._control.listen(control_path(self._private_dir))
        if config.has_vision:
            self._embeddings = EmbeddingClient(config.num_ranks)
            await self._embeddings.listen(embeddings_path(self._private_dir), self._on_worker_lost)
        version = await with_progress("vllm.importing", asyncio.to_thread(vllm_version))
        log.info("vllm.imported", version=version, seconds=round(time.monotonic() - started, 1))
        models = digest((files.digest, draft.digest)) if draft is not None else files.digest
        extra = await asyncio.to_thread(extra_arguments, config.engine_args)
        computation = computation_digest(
            models, config.effective_dtype, version, config.engine_args
        )
        arguments = engine_arguments(config, self._private_dir, computation) | extra
        if config.has_vision:
            own = computation_digest(
                files.digest, config.effective_dtype, version, config.engine_args
            )
            arguments["ec_transfer_config"] = ec_config(
                config, "ec_consumer", own, embeddings_path(self._private_dir)
            )
        arguments |= await asyncio.to_thread(
            domain_arguments, config.domain, config.device, arguments
        )
        llm = await self._launch(arguments)
        for each in (files, draft):
            if each is not None:
                await asyncio.to_thread(each.check_unchanged, self._digests)
        hellos = await asyncio.wait_for(self._control.ready, PROGRESS_EVERY_S)
        endpoint = endpoint_of(config, llm.vllm_config.cache_config.block_size, hellos)
        images = await asyncio.to_thread(find_facts, llm) if config.has_vision else None
        info = info_of(config, endpoint, hellos, images)
        self._worker_pids = tuple(h.pid for h in hellos)
        self._open_for_jobs(info, endpoint, llm)
        log.info(
            "vllm.ready",
            seconds=round(time.monotonic() - started, 1),
            num_kv_blocks=info.num_kv_blocks,
            model_fingerprint=info.model_fingerprint,
        )
        return info

    async def _launch(self, arguments: dict[str, Any]) -> AsyncLLM:
        """Start vLLM.

        Raises EngineFailed, and EngineMisconfigured if our connector refused the model.
        """
        try:
            return await self._process.start(arguments, self._view, START_TIMEOUT_S)
        except EngineFailed as error:
            assert self._private_dir is not None
            why = await asyncio.to_thread(read_refusal, control_path(self._private_dir))
            if why is None:
                raise
            raise EngineMisconfigured(
                f"{self._config.model}: {why.message}", reason=why.reason
            ) from error

    def _open_for_jobs(self, info: EngineInfo, endpoint: Endpoint, llm: AsyncLLM) -> None:
        config, num_ranks = self._config, info.num_ranks
        assert self._control is not None
        self._num_blocks = info.num_kv_blocks
        self._names.capacity = max(1024, NAMES_PER_BLOCK * info.num_kv_blocks)
        self._names.group = endpoint.named_group
        self._jobs = Jobs(endpoint, num_ranks)
        self._checks = PeerChecks(self._control.broadcast, num_ranks)
        if config.tiers.is_on:
            self._tiers = TierClient(
                self._control.broadcast, num_ranks, config.tiers.timeout_s, self._find_holders
            )
        if config.max_adapters:
            assert self._private_dir is not None
            self._adapters = VllmAdapters(
                config,
                llm,
                self._private_dir / "adapters",
                lambda changed: self._queue.put([changed]),
                lambda error: self._task_died("vllm-adapters", error),
            )
        self._requests = Requests(
            llm,
            config.instance_id,
            self._tiers,
            self._names.num_held,
            RequestEvents(self._on_drawn, self._on_refused, self._on_ended, self._die),
            self._adapters,
        )
        self._requests.images = VllmImages(llm, info.images)
        self._requests.embeddings = self._embeddings
        self._events = self._watched(self._follow_events(), "vllm-kv-events")

    async def stop(self) -> None:
        if self._is_stopping:
            return
        self._is_stopping = True
        self._digests.stop()
        for timer in self._deadlines.values():
            timer.cancel()
        tasks = [*(self._requests.tasks if self._requests else [])]
        tasks += [self._events] if self._events else []
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)
        if self._adapters is not None:
            await self._adapters.host.stop()
        await self._process.stop()
        if self._control is not None:
            await self._control.close()  # makes any remaining worker exit
        if self._embeddings is not None:
            await self._embeddings.close()
        if self._private_dir is not None:
            shutil.rmtree(self._private_dir, ignore_errors=True)
        log.info("vllm.stopped")

    # -- jobs -------------------------------------------------------------------------------------

    def prefill(self, job: PrefillJob) -> None:
        failpoints.hit("prefill.accepted")
        assert self._jobs is not None, "start() has not returned"
        self._jobs.prefill(job)
        if job.awaits_embeddings and self._embeddings is not None:
            self._embeddings.awaited.expect(job.leg)
        params = None
        if hands_on(job, self._config.max_model_len):
            assert job.staging is not None
            params = store_params(
                job.ticket_id,
                job.attempt,
                job.staging,
                self._config.lease_s,
                job.is_per_layer,
            )
            if job.is_per_layer:
                self._open_ticket(job, job.staging)
        max_tokens = 1 if job.staging is not None else job.sampling.max_tokens
        names = self._names_to_fetch(job)
        assert self._requests is not None
        self._requests.submit(
            job.leg,
            list(job.prompt),
            job.sampling,
            max_tokens,
            job.cache_salt,
            params,
            names,
            job.adapter,
            job.images,
            job.priority,
        )

    def _names_to_fetch(self, job: PrefillJob) -> Sequence[bytes]:
        """The names of the prompt's blocks that the tiers, which keep KV outside vLLM, may provide.

        The last token is always computed. Blocks that the engine seems to hold are included,
        because the engine may evict some before the step.
        """
        is_all_computed = job.sampling.num_prompt_logprobs is not None
        if self._tiers is None or not job.cache_salt or is_all_computed:
            return ()
        return job.block_hashes[: (len(job.prompt) - 1) // self._config.block_size]

    def decode(self, job: DecodeJob) -> None:
        failpoints.hit("decode.accepted")
        assert self._jobs is not None, "start() has not returned"
        if refusal := self._jobs.decode(job):
            self._apply(refusal)
            return
        params = load_params(
            job.leg,
            job.ticket,
            job.landing,
            job.deadline_s,
            len(job.prompt),
            job.first_token is None,
            job.stall_s,
        )
        prompt = [*job.prompt, STAND_IN if job.first_token is None else job.first_token]
        assert self._requests is not None
        self._requests.submit(
            job.leg,
            prompt,
            job.sampling,
            job.sampling.max_tokens,
            job.cache_salt,
            params,
            adapter=job.adapter,
            images=job.images,
            priority=job.priority,
        )

    def _open_ticket(self, job: PrefillJob, staging: ArenaRange) -> None:
        assert self._control is not None
        order = Open(
            job.ticket_id,
            job.attempt,
            staging.offset,
            staging.length,
            len(job.prompt),
            self._config.lease_s,
        )
        self._control.broadcast(order)

    def join(self, leg: int, first_token: int) -> None:
        if self._jobs is not None and self._jobs.awaits_first_token(leg):
            assert self._control is not None
            self._control.broadcast(Join(leg, first_token))

    def embedded(self, leg: int, encoder: KvPeer | None) -> None:
        if self._embeddings is not None:
            self._embeddings.awaited.tell(leg, encoder)

    def abort(self, leg: int) -> None:
        if self._jobs is not None:
            self._queue.drop(leg)
            self._apply(self._jobs.abort(leg))

    def release(self, ticket_id: str) -> None:
        if self._jobs is not None:
            self._apply(self._jobs.release(ticket_id))

    async def verify_peer(self, peer: KvPeer, timeout_s: float) -> None:
        assert self._checks is not None, "start() has not returned"
        await self._checks.verify(peer, timeout_s)

    def forget_peer(self, peer: KvPeer) -> None:
        if self._checks is not None:
            self._checks.forget(peer)

    def pin(self, prefixes: Sequence[PinnedPrefix]) -> None:
        if self._tiers is not None:
            self._tiers.pin(prefixes)

    def note_session(self, hint: SessionHint) -> None:
        if self._tiers is not None:
            self._tiers.note_session(hint)

    def prefetch(self, wanted: Prefetch) -> None:
        if self._tiers is not None:
            self._tiers.prefetch(wanted)

    async def inspect_adapter(self, path: str) -> AdapterFacts:
        if self._adapters is None:
            raise AdapterUnusable("this instance takes no adapters: set ENABLE_LORA")
        return await self._adapters.host.inspect(path)

    def keep_adapters(self, digests: Collection[str]) -> None:
        if self._adapters is not None:
            self._adapters.host.keep(digests)

    async def outputs(self) -> AsyncIterator[list[Output]]:
        async for batch in self._queue.batches():
            yield batch

    async def ping(self) -> None:
        """Check that vLLM's engine process is alive. The process answers only between two steps."""
        if not await self._process.is_alive():
            self._die("vLLM's engine process died; see its log")

    def stats(self) -> EngineStats:
        jobs = self._jobs
        others = self._adapters.host.num_signs if self._adapters is not None else 0
        others += self._embeddings.awaited.num_gathered if self._embeddings is not None else 0
        return EngineStats(
            num_running=jobs.num_open if jobs else 0,
            num_kv_blocks_free=round(self._num_blocks * (1.0 - self._view.kv_cache_usage)),
            num_signs=sum(w.num_signs for w in self._working.values()) + others,
            num_tokens=max((w.num_tokens for w in self._working.values()), default=0),
            avoided_encoders=self._embeddings.awaited.avoided if self._embeddings else (),
            extra=self._view.numbers()
            | {"num_kv_connections": sum(self._num_connections.values())}
            | (self._embeddings.awaited.numbers() if self._embeddings is not None else {}),
        )

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """One pid per rank, in order."""
        return self._worker_pids

    @property
    def is_idle(self) -> bool:
        """Whether there is no job, no request, and no KV that a decode may still pull."""
        if self._jobs is None or self._requests is None:
            return False
        return self._jobs.is_idle and self._requests.is_idle

    def check_idle(self) -> None:
        """Assert that the engine holds nothing for any job. Tests call this when no job is left."""
        assert self._jobs is not None
        self._jobs.check_invariants()
        assert self.is_idle
        assert not self._deadlines
        assert self._tiers is None or self._tiers.is_idle
        assert self._adapters is None or self._adapters.host.is_idle
        assert self._embeddings is None or not len(self._embeddings.awaited)

    # -- one job ----------------------------------------------------------------------------------

    def _watched(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Start a task that the engine needs. If the task fails, the engine counts as dead."""
        return watched(work, name, lambda error: self._task_died(name, error))

    def _task_died(self, name: str, error: BaseException) -> None:
        log.error("vllm.task.failed", task=name, exc_info=error)
        self._die(f"{name} failed: {error.__class__.__name__}")

    def _on_drawn(self, drawn: Drawn) -> None:
        assert self._jobs is not None
        self._apply(self._jobs.handle(drawn))

    def _on_refused(self, leg: int, error: MeshError) -> None:
        assert self._jobs is not None
        is_retryable = not isinstance(error, AdapterMisfit | ImageUnusable)
        failed = Failed(leg, error.reason, error.message, is_retryable)
        self._apply(self._jobs.refused(failed))

    def _on_ended(self, leg: int) -> None:
        self._pull_ended(leg)

    def _pull_begun(self, leg: int) -> None:
        """Limit the time of a request's pull.

        Other waits of the request have no limit here, because they depend only on this engine's
        progress.
        """
        assert self._jobs is not None
        most_s = self._jobs.pull_deadline_s(leg) + PULL_GRACE_S
        loop = asyncio.get_running_loop()
        self._deadlines[leg] = loop.call_later(most_s, self._on_deadline, leg)

    def _pull_ended(self, leg: int) -> None:
        if (timer := self._deadlines.pop(leg, None)) is not None:
            timer.cancel()

    def _on_deadline(self, leg: int) -> None:
        assert self._jobs is not None
        del self._deadlines[leg]
        self._apply(self._jobs.overdue(leg))

    def _apply(self, effects: Iterable[Effect]) -> None:
        outputs: list[Output] = []
        for effect in effects:
            match effect:
                case ReleaseAtRanks():
                    if self._control is not None:
                        self._control.broadcast(Release(effect.ticket_id))
                case CancelRequest():
                    if self._requests is not None:
                        self._requests.cancel(effect.leg)
                case _:
                    if isinstance(effect, KvPulling):
                        self._pull_begun(effect.leg)
                    elif isinstance(effect, KvArrived | Failed):
                        self._pull_ended(effect.leg)
                    outputs.append(effect)
        self._queue.put(outputs)

    # -- workers ----------------------------------------------------------------------------------

    def _on_worker_message(self, message: ToHost) -> None:
        assert not isinstance(message, RankHello)
        match message:
            case Fetched():
                if self._tiers is not None:
                    self._tiers.on_fetched(message)
                return
            case TierNews():
                self._queue.put(outputs_of(message))
                return
            case Probed():
                if self._checks is not None:
                    self._checks.on_probed(message)
                return
            case Connections():
                self._num_connections[message.rank] = message.num_open
                return
            case Working():
                self._working[message.rank] = message
                return
            case EmbeddingsFetched() | EmbeddingsHeld():
                return  # the EmbeddingClient receives these on its own socket
        if self._jobs is not None:
            self._apply(self._jobs.handle(message))

    def _on_worker_lost(self, error: WorkerLost) -> None:
        self._die(str(error))

    def _die(self, message: str) -> None:
        if self._is_stopping or self._queue.has_failed:
            return
        log.error("vllm.died", cause=message)
        self._queue.fail(EngineFailed(message, reason="ENGINE_DEAD"))

    async def _follow_events(self) -> None:
        assert self._private_dir is not None
        await read_events(
            events_endpoint(self._private_dir),
            self._names,
            lambda changed: self._queue.put([changed]),
        )
