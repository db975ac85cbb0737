"""Runs vLLM as the engine of a pooling instance, which makes vectors or scores of whole texts.

Each input of a job is one vLLM request. vLLM batches the requests of several jobs. vLLM's engine
process answers pings between two steps. Each step is a sign of work, from which the instance sees
that the engine does not hang.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import structlog

from pdmesh import failpoints
from pdmesh.core.deadlines import ENGINE_HUNG_S
from pdmesh.core.pooling.facts import PoolingTask
from pdmesh.core.pooling.step_time_limit import StepTimeLimit
from pdmesh.engine.base import EngineInfo, EngineStats, Failed, Output, Pooled, PoolJob
from pdmesh.engine.no_kv import NoKv
from pdmesh.engine.vllm.child.extra_arguments import extra_arguments
from pdmesh.engine.vllm.child.llm_process import START_TIMEOUT_S, LlmProcess
from pdmesh.engine.vllm.child.preflight import check_memory, check_processor
from pdmesh.engine.vllm.child.startup import vllm_version, with_progress
from pdmesh.engine.vllm.config import CPU_STEP_TOKENS, environment
from pdmesh.engine.vllm.host.stats import SchedulerView
from pdmesh.engine.vllm.job_tasks import JobTasks
from pdmesh.engine.vllm.loading.choice import check_weights
from pdmesh.engine.vllm.model.file_digests import FileDigests, default_cache_dir
from pdmesh.engine.vllm.model.fingerprint import computation_digest
from pdmesh.engine.vllm.model.model_files import read_model
from pdmesh.engine.vllm.pooling.config import VllmPoolingConfig, fitted, pooling_arguments
from pdmesh.engine.vllm.pooling.description import facts_of, takes_token_types
from pdmesh.errors import EngineFailed, InvalidRequest
from pdmesh.net.tasks import end

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

log = structlog.get_logger(__name__)


class VllmPoolingEngine(NoKv):
    """`pdmesh.engine.base.PoolingEngine` describes the methods.

    A process has one engine, started only once.
    """

    def __init__(self, config: VllmPoolingConfig) -> None:
        self._config = config
        self._digests = FileDigests(default_cache_dir())
        self._process = LlmProcess()
        self._llm: AsyncLLM | None = None
        self._view = SchedulerView()
        self._jobs = JobTasks(self._process)
        self._num_tokens = self._num_open_tokens = 0
        self._step_limit: StepTimeLimit | None = None  # None on a GPU, or if every step is short
        self._takes_types = False
        self._is_stopping = False

    # -- life -------------------------------------------------------------------------------------

    async def start(self) -> EngineInfo:
        scheduling, loader = self._config.scheduling, self._config.loader
        log.info(
            "vllm.starting",
            model=self._config.model,
            dtype=self._config.effective_dtype,
            async_scheduling=scheduling.is_async,
            because=scheduling.reason,
            reads_in_file_order=loader.is_file_order,
            loader_because=loader.reason,
        )
        try:
            return await self._start(time.monotonic())
        except (EngineFailed, asyncio.CancelledError):
            await self.stop()
            raise

    async def _start(self, started: float) -> EngineInfo:
        config = self._config
        await asyncio.to_thread(check_weights, config.loader, config.model_dir)
        files = await asyncio.to_thread(
            read_model, config.model_dir, self._digests, config.file_digests
        )
        check_processor(config)
        check_memory(config)
        os.environ.update(environment(config, os.environ))
        version = await with_progress("vllm.importing", asyncio.to_thread(vllm_version))
        arguments = await asyncio.to_thread(_fitted, config)
        self._step_limit = _step_limit(config, arguments)
        llm = await self._process.start(arguments, self._view, START_TIMEOUT_S)
        await asyncio.to_thread(files.check_unchanged, self._digests)
        self._llm = llm
        model = llm.vllm_config.model_config
        facts = facts_of(model, await llm.get_supported_tasks())
        self._takes_types = takes_token_types(model)
        fingerprint = computation_digest(
            files.digest, config.effective_dtype, version, config.engine_args
        )
        log.info(
            "vllm.ready",
            seconds=round(time.monotonic() - started, 1),
            tasks=sorted(task.value for task in facts.tasks),
            max_model_len=model.max_model_len,
        )
        return EngineInfo(
            engine="vllm",
            model=config.model,
            model_fingerprint=fingerprint,
            block_size=1,
            num_kv_blocks=0,
            kv_bytes_per_token=0,
            max_model_len=model.max_model_len,
            num_ranks=config.tensor_parallel_size,
            pooling=facts,
        )

    async def stop(self) -> None:
        if self._is_stopping:
            return
        self._is_stopping = True
        self._digests.stop()
        await self._jobs.stop()
        await self._process.stop()
        log.info("vllm.stopped")

    # -- jobs -------------------------------------------------------------------------------------

    def pool(self, job: PoolJob) -> None:
        failpoints.hit("pool.accepted")
        self._jobs.begin(job.leg, f"pool-{job.leg}", self._compute(job))

    def abort(self, leg: int) -> None:
        self._jobs.abort(leg)

    def outputs(self) -> AsyncIterator[list[Output]]:
        return self._jobs.outputs()

    async def ping(self) -> None:
        await self._jobs.ping()

    def stats(self) -> EngineStats:
        num_signs = self._view.num_steps
        if self._step_limit is not None:
            now = time.monotonic()
            num_signs = self._step_limit.num_signs(num_signs, self._num_open_tokens, now)
        return EngineStats(
            num_running=len(self._jobs),
            num_signs=num_signs,
            num_tokens=self._num_tokens,
            extra=self._view.numbers(),
        )

    # -- one job ----------------------------------------------------------------------------------

    async def _compute(self, job: PoolJob) -> None:
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError

        num_tokens = sum(map(len, job.inputs))
        self._num_open_tokens += num_tokens
        readers = [
            asyncio.create_task(self._input(job, place), name=f"pool-{job.leg}-{place}")
            for place in range(len(job.inputs))
        ]
        try:
            found = await asyncio.gather(*readers)
        except EngineDeadError:
            self._jobs.engine_died()
            return
        except Exception as error:  # noqa: BLE001  vLLM's errors have no common base; each ends one leg
            log.warning("vllm.request.failed", leg=job.leg, error=error.__class__.__name__)
            self._jobs.put(failure_of(job.leg, error, (VLLMClientError, ValueError, TypeError)))
            return
        finally:
            self._num_open_tokens -= num_tokens
            await end(readers)
        self._num_tokens += num_tokens
        num_cached = sum(cached for _, cached in found)
        data = b"".join(values for values, _ in found)
        num_values = len(data) // (4 * len(found))
        self._jobs.put(Pooled(job.leg, data, num_values, num_cached))

    async def _input(self, job: PoolJob, place: int) -> tuple[bytes, int]:
        """The values of one input, and how many of its tokens were cached."""
        from vllm.inputs import tokens_input

        assert self._llm is not None, "start() has not returned"
        prompt = tokens_input(list(job.inputs[place]), cache_salt=job.cache_salt or None)
        name = f"{self._config.instance_id}-{job.leg}-{place}"
        params = pooling_params(job, place, takes_types=self._takes_types)
        async for output in self._llm.encode(prompt, params, name):
            failpoints.hit("pool.computing")
            if output.error is not None:
                raise EngineFailed("vLLM failed the request")
            values = output.outputs.data.float().cpu().contiguous().numpy().astype("<f4")
            return values.tobytes(), output.num_cached_tokens
        raise EngineFailed("vLLM gave no output")


def failure_of(leg: int, error: Exception, refusals: tuple[type[Exception], ...]) -> Failed:
    """`refusals` are vLLM's errors for a request that every instance would refuse."""
    name = error.__class__.__name__
    if isinstance(error, refusals):
        return Failed(leg, InvalidRequest.default_reason, f"vLLM refused it: {name}", False)
    return Failed(leg, EngineFailed.default_reason, f"vLLM failed the request: {name}")


def pooling_params(job: PoolJob, place: int, *, takes_types: bool) -> Any:
    """vLLM's PoolingParams. The type is Any because vLLM is imported late."""
    from vllm import PoolingParams

    extra = None
    has_second = bool(job.first_lengths) and job.first_lengths[place] < len(job.inputs[place])
    if takes_types and has_second:
        extra = {"compressed_token_type_ids": job.first_lengths[place]}
    is_cut = job.task is PoolingTask.EMBED and job.num_dimensions
    return PoolingParams(
        task=job.task.value,
        dimensions=job.num_dimensions if is_cut else None,
        use_activation=job.use_activation,
        extra_kwargs=extra,
    )


def _step_limit(config: VllmPoolingConfig, arguments: dict[str, Any]) -> StepTimeLimit | None:
    step_tokens = int(arguments.get("max_num_batched_tokens", 0))
    if config.device != "cpu" or step_tokens <= CPU_STEP_TOKENS:
        return None
    return StepTimeLimit(step_tokens, CPU_STEP_TOKENS, ENGINE_HUNG_S)


def _fitted(config: VllmPoolingConfig) -> dict[str, Any]:
    """Blocks. Raises EngineFailed with vLLM's own cause."""
    try:
        return fitted(config, pooling_arguments(config) | extra_arguments(config.engine_args))
    except (RuntimeError, ValueError, OSError, TypeError) as error:
        text = (str(error).strip().splitlines() or [""])[0]
        message = f"vLLM did not start ({error.__class__.__name__}: {text})"
        raise EngineFailed(message, reason="ENGINE_START") from error
