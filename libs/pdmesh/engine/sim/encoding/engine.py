"""The simulated encoder, which makes embeddings of images for prefills.

One loop encodes one image after the other, as a device does, in the time that a formula gives.
Prefills fetch the embeddings over the real transport. An image takes no time if its embeddings are
in the pool already.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pdmesh import failpoints
from pdmesh.core.images.prompt_image import ImageFacts, PromptImage
from pdmesh.core.instance.step_time_law import Law
from pdmesh.engine.base import Encoded, EncodeJob, EngineInfo, EngineStats, Failed
from pdmesh.engine.serial_jobs import SerialJobs
from pdmesh.engine.sim.encoding.embeddings import sim_embedding
from pdmesh.errors import EngineFailed
from pdmesh.kv.agent.agent import KvAgent
from pdmesh.kv.embeddings.names import embedding_name, identifier_of
from pdmesh.kv.embeddings.pool import EmbeddingPool


@dataclass(frozen=True, slots=True)
class SimEncoderConfig:
    model: str
    model_fingerprint: str
    max_model_len: int
    images: ImageFacts
    pool_bytes: int
    law: Law


class SimEncoderEngine(SerialJobs[EncodeJob]):
    """See `pdmesh.engine.base.EncoderEngine`."""

    def __init__(
        self, config: SimEncoderConfig, make_agent: Callable[[EmbeddingPool], KvAgent]
    ) -> None:
        super().__init__()
        self._config = config
        self.pool = EmbeddingPool(config.pool_bytes)
        self._agent = make_agent(self.pool)

    async def start(self) -> EngineInfo:
        address = await self._agent.start()
        self._start_loop("sim-encoder")
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
        await super().stop()
        await self._agent.close()

    def encode(self, job: EncodeJob) -> None:
        failpoints.hit("encode.accepted")
        self._begin(job)

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self._jobs),
            num_signs=self._num_signs,
            num_tokens=self._num_tokens,
            extra={"num_kv_connections": self._agent.stats().num_peers},
        )

    # -- one job ----------------------------------------------------------------------------------

    async def _compute(self, job: EncodeJob) -> None:
        num_computed = 0
        for image in job.images:
            name = embedding_name(identifier_of(job.cache_salt, image.digest))
            if name in self.pool:
                continue
            if not await self._computed(job, name, image):
                return
            num_computed += 1
        self._end(job, Encoded(job.leg, num_computed))

    async def _computed(self, job: EncodeJob, name: bytes, image: PromptImage) -> bool:
        """Encode one image into the pool. Return False if the job was aborted or has failed."""
        await self._wait_out(self._config.law.prefill_s(image.num_tokens))
        made = sim_embedding(image)
        if failpoints.hit("encode.computing") == "zero-embeddings":
            made = np.zeros_like(made)
        if not self._is_wanted(job):
            return False
        self._num_tokens += image.num_tokens
        if self.pool.add(name, made) is None:
            message = "no room for embeddings"
            self._end(job, Failed(job.leg, EngineFailed.default_reason, message))
            return False
        return True
