"""Lets prefills of the simulated engine wait for the embeddings of their images.

The sim model needs no embeddings, but the engine fetches and checks them. It fails a prompt whose
embeddings are wrong: a real model would answer about another image. A job computes one leg, which
is a request's stay on this engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np

from pdmesh.core.model import PeerId
from pdmesh.engine.awaited_embeddings import AwaitedEmbeddings
from pdmesh.engine.base import Failed, KvPeer, Output, PrefillJob
from pdmesh.engine.sim.encoding.embeddings import empty_like_embedding, sim_embedding
from pdmesh.errors import EngineFailed
from pdmesh.kv.agent.agent import KvAgent
from pdmesh.kv.embeddings.names import embedding_name, identifier_of
from pdmesh.kv.transport.base import ByteArray
from pdmesh.net.tasks import end, watched


class EmbeddingQueue:
    """The jobs that wait for embeddings.

    When a job's wait is over, `go` is called with the job and the number of its leading images
    whose embeddings are here. `give_up` is called with a job whose embeddings are wrong.
    """

    def __init__(
        self,
        agent: KvAgent,
        go: Callable[[PrefillJob, int], None],
        give_up: Callable[[PrefillJob], None],
        emit: Callable[[Output], None],
        die: Callable[[BaseException], None],
    ) -> None:
        self._agent, self._go, self._give_up = agent, go, give_up
        self._emit, self._die = emit, die
        self._awaited = AwaitedEmbeddings()
        self._jobs: dict[int, tuple[PrefillJob, asyncio.Task[None]]] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._jobs)

    @property
    def is_idle(self) -> bool:
        return not (self._jobs or len(self._awaited))

    @property
    def num_signs(self) -> int:
        return self._awaited.num_gathered

    @property
    def avoided(self) -> tuple[PeerId, ...]:
        return self._awaited.avoided

    def numbers(self) -> dict[str, float]:
        return self._awaited.numbers()

    def __contains__(self, leg: int) -> bool:
        return leg in self._awaited

    def expect(self, leg: int) -> None:
        """Note that the job of this leg, which the engine has accepted, needs embeddings."""
        self._awaited.expect(leg)

    def begin(self, job: PrefillJob) -> None:
        """Fetch the embeddings for a job whose adapter and guide are ready."""
        task = watched(self._wait(job), f"sim-embeddings-{job.leg}", self._die)
        self._jobs[job.leg] = job, task

    def tell(self, leg: int, encoder: KvPeer | None) -> None:
        self._awaited.tell(leg, encoder)

    def abort(self, leg: int) -> PrefillJob | None:
        """Remove a leg. Returns the leg's job, if the job waited here."""
        self._awaited.forget(leg)
        job, task = self._jobs.pop(leg, (None, None))
        if task is not None:
            task.cancel()
        return job

    async def stop(self) -> None:
        await end(task for _, task in self._jobs.values())

    async def _wait(self, job: PrefillJob) -> None:
        targets = [empty_like_embedding(image) for image in job.images]

        async def fetch(encoder: KvPeer, deadline_s: float) -> int:
            return await self._fetch(job, encoder, targets, deadline_s)

        num = await self._awaited.gather(job.leg, len(job.images), fetch)
        del self._jobs[job.leg]
        pairs = zip(job.images[:num], targets, strict=False)
        if all(np.array_equal(sim_embedding(image), data) for image, data in pairs):
            self._go(job, num)
            return
        self._give_up(job)
        self._emit(Failed(job.leg, EngineFailed.default_reason, "embeddings of another image"))

    async def _fetch(
        self, job: PrefillJob, encoder: KvPeer, targets: list[ByteArray], deadline_s: float
    ) -> int:
        """Raises KvTransferFailed."""
        names = [embedding_name(identifier_of(job.cache_salt, i.digest)) for i in job.images]
        found = await self._agent.fetch(
            encoder.addresses[0],
            encoder.incarnation,
            names,
            targets,
            deadline_s=deadline_s,
            on_freed=lambda: None,  # the targets are not read after a failure
            source=encoder.instance_id,
        )
        return len(found)
