"""The sim's encoder: embeddings by a function, time by a law, bytes over the real transport.

One loop encodes one image after the other, as a device does. An image whose embeddings are held
already takes no time.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from pdmesh import failpoints
from pdmesh.core.images.prompt_image import ImageFacts, PromptImage
from pdmesh.engine.base import Encoded, EncodeJob, EngineInfo, EngineStats, Failed, Output
from pdmesh.engine.laws import Law
from pdmesh.engine.no_kv import NoKv
from pdmesh.engine.sim.encoding.embeddings import sim_embedding
from pdmesh.errors import EngineFailed
from pdmesh.kv.agent.agent import KvAgent
from pdmesh.kv.embeddings.names import embedding_name, identifier_of
from pdmesh.kv.embeddings.pool import EmbeddingPool
from pdmesh.net.tasks import watched

_SIGN_S: Final = 0.1  # how often a long computation gives a sign


@dataclass(frozen=True, slots=True)
class SimEncoderConfig:
    model: str
    model_fingerprint: str
    max_model_len: int
    images: ImageFacts
    pool_bytes: int
    law: Law


class SimEncoderEngine(NoKv):
    """See `pdmesh.engine.base.EncoderEngine`."""

    def __init__(
        self, config: SimEncoderConfig, make_agent: Callable[[EmbeddingPool], KvAgent]
    ) -> None:
        self._config = config
        self.pool = EmbeddingPool(config.pool_bytes)
        self._agent = make_agent(self.pool)
        self._jobs: dict[int, EncodeJob] = {}
        self._num_signs = self._num_tokens = 0
        self._work, self._has_output = asyncio.Event(), asyncio.Event()
        self._outputs: list[Output] = []
        self._pings: list[asyncio.Future[None]] = []
        self._loop: asyncio.Task[None] | None = None
        self._error: BaseException | None = None

    async def start(self) -> EngineInfo:
        address = await self._agent.start()
        self._loop = watched(self._run(), "sim-encoder", self._die)
        config = self._config
        return EngineInfo(
            engine="sim",
            model=config.model,
            model_fingerprint=config.model_fingerprint,
            block_size=1,
            num_kv_blocks=0,
            kv_bytes_per_token=0,
            max_model_len=config.max_model_len,
            kv_addresses=(address,),
            images=config.images,
        )

    async def stop(self) -> None:
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.wait([self._loop], timeout=1.0)
        await self._agent.close()

    def encode(self, job: EncodeJob) -> None:
        failpoints.hit("encode.accepted")
        self._jobs[job.leg] = job
        self._work.set()

    def abort(self, leg: int) -> None:
        self._jobs.pop(leg, None)
        self._outputs = [o for o in self._outputs if not _is_of(o, leg)]

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
        return EngineStats(
            num_running=len(self._jobs),
            num_signs=self._num_signs,
            num_tokens=self._num_tokens,
            extra={"num_kv_connections": self._agent.stats().num_peers},
        )

    # -- one job ----------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            if failpoints.hit("engine.step") == "hang":
                await asyncio.Event().wait()
            self._answer_pings()
            leg = next(iter(self._jobs), None)
            if leg is None:
                self._work.clear()
                await self._work.wait()
                continue
            await self._encode(self._jobs[leg])

    async def _encode(self, job: EncodeJob) -> None:
        num_computed = 0
        for image in job.images:
            name = embedding_name(identifier_of(job.cache_salt, image.digest))
            if name in self.pool:
                continue
            if not await self._computed(job, name, image):
                return
            num_computed += 1
        self._jobs.pop(job.leg, None)
        self._emit(Encoded(job.leg, num_computed))

    async def _computed(self, job: EncodeJob, name: bytes, image: PromptImage) -> bool:
        """False if the job has ended."""
        await self._wait_out(self._config.law.prefill_s(image.num_tokens))
        made = sim_embedding(image)
        if failpoints.hit("encode.computing") == "zero-embeddings":
            made = np.zeros_like(made)
        self._answer_pings()
        if job.leg not in self._jobs:
            return False  # it was aborted
        self._num_tokens += image.num_tokens
        if self.pool.add(name, made) is None:
            del self._jobs[job.leg]
            self._emit(Failed(job.leg, EngineFailed.default_reason, "no room for embeddings"))
            return False
        return True

    async def _wait_out(self, duration: float) -> None:
        num_parts = max(1, math.ceil(duration / _SIGN_S))
        for _ in range(num_parts):
            await asyncio.sleep(duration / num_parts)
            self._num_signs += 1

    def _answer_pings(self) -> None:
        for answer in self._pings:
            if not answer.done():
                answer.set_result(None)
        self._pings.clear()

    def _emit(self, output: Output) -> None:
        self._outputs.append(output)
        self._has_output.set()

    def _die(self, error: BaseException) -> None:
        self._error = error
        self._has_output.set()


def _is_of(output: Output, leg: int) -> bool:
    return isinstance(output, Encoded | Failed) and output.leg == leg
