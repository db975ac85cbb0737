"""Runs vLLM as the engine of an encoder, an instance that makes image embeddings for prefills.

A job is the instance's order to encode the images of a prompt. Each image is one vLLM request. Jobs
that need the same image at the same time share one request. The worker reports which embeddings its
pool holds, and these are not made again.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog

from pdmesh import failpoints
from pdmesh.core.images.prompt_image import ImageFacts, PromptImage
from pdmesh.engine.base import Encoded, EncodeJob, EngineInfo, EngineStats, Failed, Output
from pdmesh.engine.no_kv import NoKv
from pdmesh.engine.vllm.child.extra_arguments import extra_arguments
from pdmesh.engine.vllm.child.llm_process import START_TIMEOUT_S, LlmProcess
from pdmesh.engine.vllm.child.preflight import check_memory, check_processor
from pdmesh.engine.vllm.child.private_dir import make_private_dir
from pdmesh.engine.vllm.child.startup import PROGRESS_EVERY_S, vllm_version, with_progress
from pdmesh.engine.vllm.config import environment
from pdmesh.engine.vllm.encoding.config import (
    VllmEncoderConfig,
    embeddings_path,
    encoder_arguments,
)
from pdmesh.engine.vllm.host.control import ControlServer, WorkerLost
from pdmesh.engine.vllm.host.stats import SchedulerView
from pdmesh.engine.vllm.images.facts import find_facts
from pdmesh.engine.vllm.images.inputs import VllmImages
from pdmesh.engine.vllm.job_tasks import JobTasks
from pdmesh.engine.vllm.messages import EmbeddingsHeld, ToHost
from pdmesh.engine.vllm.model.file_digests import FileDigests, default_cache_dir
from pdmesh.engine.vllm.model.fingerprint import computation_digest
from pdmesh.engine.vllm.model.model_files import read_model
from pdmesh.errors import EngineFailed, EngineMisconfigured, ImageMisfit, ImageUnusable
from pdmesh.kv.embeddings.names import embedding_name, identifier_of
from pdmesh.net.tasks import end

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

log = structlog.get_logger(__name__)

_STORED_S: Final = 2.0  # longest wait for the worker's report after the end of a request


class VllmEncoderEngine(NoKv):
    """`pdmesh.engine.base.EncoderEngine` describes the methods.

    A process has one engine, started only once.
    """

    def __init__(self, config: VllmEncoderConfig) -> None:
        self._config = config
        self._digests = FileDigests(default_cache_dir())
        self._process = LlmProcess()
        self._private_dir: Path | None = None
        self._control: ControlServer | None = None
        self._llm: AsyncLLM | None = None
        self._images: VllmImages | None = None
        self._facts: ImageFacts | None = None
        self._view = SchedulerView()
        self._jobs = JobTasks(self._process)
        self._held: set[bytes] = set()
        self._encodings: dict[bytes, asyncio.Task[None]] = {}  # under way, by name
        self._num_waiting: Counter[bytes] = Counter()  # jobs that await each encoding, by name
        self._stored: dict[bytes, asyncio.Future[bool]] = {}
        self._num_requests = self._num_tokens = 0
        self._worker_pids: tuple[int, ...] = ()
        self._is_stopping = False

    # -- life -------------------------------------------------------------------------------------

    async def start(self) -> EngineInfo:
        log.info("vllm.starting", model=self._config.model, dtype=self._config.effective_dtype)
        try:
            return await self._start(time.monotonic())
        except (EngineFailed, asyncio.CancelledError):
            await self.stop()
            raise

    async def _start(self, started: float) -> EngineInfo:
        config = self._config
        check_processor(config)
        files = await asyncio.to_thread(
            read_model, config.model_dir, self._digests, config.file_digests
        )
        check_memory(config)
        os.environ.update(environment(config, os.environ))
        self._private_dir = make_private_dir()
        self._control = ControlServer(self._on_message, self._on_lost)
        await self._control.listen(embeddings_path(self._private_dir))
        version = await with_progress("vllm.importing", asyncio.to_thread(vllm_version))
        extra = await asyncio.to_thread(extra_arguments, config.engine_args)
        computation = computation_digest(
            files.digest, config.effective_dtype, version, config.engine_args
        )
        arguments = encoder_arguments(config, self._private_dir, computation) | extra
        llm = self._llm = await self._process.start(arguments, self._view, START_TIMEOUT_S)
        await asyncio.to_thread(files.check_unchanged, self._digests)
        (hello,) = await asyncio.wait_for(self._control.ready, PROGRESS_EVERY_S)
        self._worker_pids = (hello.pid,)
        facts = await asyncio.to_thread(find_facts, llm)
        if facts is None:
            raise EngineMisconfigured(
                "the mesh serves no images with this model: "
                "the log event vllm.images.unsupported says why"
            )
        self._images, self._facts = VllmImages(llm, facts), facts
        log.info(
            "vllm.ready",
            seconds=round(time.monotonic() - started, 1),
            has_language_model=config.has_language_model,
        )
        return EngineInfo(
            engine="vllm",
            model=config.model,
            model_fingerprint=computation,
            block_size=1,
            num_kv_blocks=0,
            kv_bytes_per_token=0,
            max_model_len=config.max_model_len,
            kv_addresses=(hello.address,),
            images=facts,
        )

    async def stop(self) -> None:
        if self._is_stopping:
            return
        self._is_stopping = True
        self._digests.stop()
        await self._jobs.stop()
        await end(self._encodings.values())
        await self._process.stop()
        if self._control is not None:
            await self._control.close()
        if self._private_dir is not None:
            shutil.rmtree(self._private_dir, ignore_errors=True)
        log.info("vllm.stopped")

    # -- jobs -------------------------------------------------------------------------------------

    def encode(self, job: EncodeJob) -> None:
        failpoints.hit("encode.accepted")
        self._jobs.begin(job.leg, f"encode-{job.leg}", self._run(job))

    def abort(self, leg: int) -> None:
        """Some images of an aborted job are still encoded, for later prompts that contain them."""
        self._jobs.abort(leg)

    def outputs(self) -> AsyncIterator[list[Output]]:
        return self._jobs.outputs()

    async def ping(self) -> None:
        await self._jobs.ping()

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=max(len(self._jobs), len(self._encodings)),
            num_signs=self._view.num_steps,
            num_tokens=self._num_tokens,
            extra=self._view.numbers(),
        )

    @property
    def worker_pids(self) -> tuple[int, ...]:
        return self._worker_pids

    # -- one job ----------------------------------------------------------------------------------

    async def _run(self, job: EncodeJob) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError

        num_computed, awaited = 0, dict[bytes, asyncio.Task[None]]()
        for image in job.images:
            identifier = identifier_of(job.cache_salt, image.digest)
            name = embedding_name(identifier)
            if name in self._held:
                continue
            if name not in self._encodings:
                self._begin(name, image, job.cache_salt)
                num_computed += 1
            awaited[name] = self._encodings[name]
        self._num_waiting.update(awaited.keys())
        try:
            await asyncio.gather(*map(asyncio.shield, awaited.values()))
        except EngineDeadError:
            self._jobs.engine_died()
        except (ImageUnusable, ImageMisfit, EngineFailed) as error:
            is_retryable = not isinstance(error, ImageUnusable)
            self._jobs.put(Failed(job.leg, error.reason, error.message, is_retryable))
        except Exception as error:  # noqa: BLE001  vLLM's errors have no common base; each ends one leg
            message = f"vLLM failed the request: {error.__class__.__name__}"
            log.warning("vllm.request.failed", leg=job.leg, error=error.__class__.__name__)
            self._jobs.put(Failed(job.leg, EngineFailed.default_reason, message))
        else:
            self._num_tokens += sum(image.num_tokens for image in job.images)
            self._jobs.put(Encoded(job.leg, num_computed))
        finally:
            self._num_waiting.subtract(awaited.keys())
            self._drop_unawaited(awaited)

    def _drop_unawaited(self, names: Iterable[bytes]) -> None:
        """Cancel those encodings in `names` that no job awaits.

        Stop when at most one batch of encodings is unawaited.
        """
        self._num_waiting = +self._num_waiting
        num_unawaited = len(self._encodings.keys() - self._num_waiting.keys())
        for name in names:
            if num_unawaited <= self._config.max_num_seqs:
                return
            if not self._num_waiting[name] and (task := self._encodings.pop(name, None)):
                self._stored.pop(name, None)
                task.cancel()
                num_unawaited -= 1

    def _begin(self, name: bytes, image: PromptImage, cache_salt: str) -> None:
        work = self._encode(name, image, cache_salt)
        task = self._encodings[name] = asyncio.create_task(work, name="encode-image")
        task.add_done_callback(lambda done: self._ended(name, done))

    def _ended(self, name: bytes, task: asyncio.Task[None]) -> None:
        if self._encodings.get(name) is task:  # otherwise it was dropped, and may have begun again
            del self._encodings[name]
            self._stored.pop(name, None)
        if not task.cancelled():
            task.exception()  # mark the error as seen: each job that awaits the task reports it

    async def _encode(self, name: bytes, image: PromptImage, cache_salt: str) -> None:
        """Raises ImageUnusable, ImageMisfit, EngineFailed, and vLLM's own errors."""
        from vllm import SamplingParams

        assert self._llm is not None
        assert self._images is not None, "start() has not returned"
        assert self._facts is not None
        stored = self._stored[name] = asyncio.get_running_loop().create_future()
        alone = [replace(image, position=0)]
        tokens = list(self._facts.tokens_of(image.num_tokens))
        request = await self._images.input_of(tokens, alone, cache_salt, lambda: False)
        params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, ignore_eos=True)
        self._num_requests += 1
        request_id = f"{self._config.instance_id}-{self._num_requests}"
        async for _ in self._llm.generate(request, params, request_id):
            failpoints.hit("encode.computing")
        done, _ = await asyncio.wait([stored], timeout=_STORED_S)
        if not (done and stored.result()):
            raise EngineFailed("the encoder's pool does not hold the embeddings of the image")

    # -- the worker -------------------------------------------------------------------------------

    def _on_message(self, message: ToHost) -> None:
        if isinstance(message, EmbeddingsHeld):
            self._held.update(message.stored)
            self._held.difference_update(message.removed)
            for names, is_held in ((message.stored, True), (message.removed, False)):
                for name in names:
                    future = self._stored.get(name)
                    if future is not None and not future.done():
                        future.set_result(is_held)

    def _on_lost(self, error: WorkerLost) -> None:
        self._jobs.die(str(error))
