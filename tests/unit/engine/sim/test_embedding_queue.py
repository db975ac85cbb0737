"""A simulated prefill computes image embeddings itself if it cannot fetch them from the encoder."""

from __future__ import annotations

import asyncio
from array import array
from typing import Any

import pytest

from pdmesh.core.images.avoided_encoders import LIMIT
from pdmesh.core.images.prompt_image import PromptImage
from pdmesh.core.kv.transfer.ticket import PullFailure
from pdmesh.engine.base import KvPeer, PrefillJob, Sampling
from pdmesh.engine.sim.encoding.embedding_queue import EmbeddingQueue
from pdmesh.errors import KvTransferFailed

ENCODER = KvPeer("encoder-0", 1, ("address",))


class UnreachableAgent:
    def __init__(self) -> None:
        self.num_asked = 0

    async def fetch(self, address: str, *_: object, **__: object) -> None:
        self.num_asked += 1
        raise KvTransferFailed("cannot connect", reason=PullFailure.CONNECT)


def job(leg: int) -> PrefillJob:
    image = PromptImage(0, 4, bytes(32), b"file")
    prompt = array("I", range(5))
    return PrefillJob(leg, "r", 0, prompt, Sampling(max_tokens=1), cache_salt="00", images=(image,))


@pytest.mark.req("S130")
@pytest.mark.fault("F34")
async def test_after_some_failures_a_prompt_is_computed_without_a_fetch() -> None:
    agent: Any = UnreachableAgent()
    gone: asyncio.Queue[tuple[int, int]] = asyncio.Queue()
    died: list[BaseException] = []
    queue = EmbeddingQueue(
        agent,
        lambda job, num: gone.put_nowait((job.leg, num)),
        lambda _: None,
        lambda _: None,
        died.append,
    )
    for leg in range(LIMIT + 2):
        queue.expect(leg)
        queue.begin(job(leg))
        queue.tell(leg, ENCODER)
        assert await asyncio.wait_for(gone.get(), 30) == (leg, 0)
    assert agent.num_asked == LIMIT
    assert queue.numbers()["num_embeddings_skipped"] == 2
    assert not died
