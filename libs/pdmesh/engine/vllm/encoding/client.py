"""The host's half of fetching image embeddings at a prefill.

An encoder is an instance that makes the embeddings of images. The host is the part of the prefill
outside its engine. It waits until a request's encoder has the embeddings, and then orders the
workers to fetch them. The request uses the embeddings that all ranks have. The prefill's own engine
encodes the other images.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pdmesh.core.kv.transfer.ticket import PullFailure
from pdmesh.engine.awaited_embeddings import AwaitedEmbeddings
from pdmesh.engine.base import KvPeer
from pdmesh.engine.vllm.encoding.plan import LANDED, landed_params
from pdmesh.engine.vllm.host.control import ControlServer, WorkerLost
from pdmesh.engine.vllm.messages import (
    EmbeddingsFetched,
    FetchEmbeddings,
    ForgetEmbeddings,
    ToHost,
)
from pdmesh.errors import KvTransferFailed

_MARGIN_S = 0.5  # for the workers' answers, after the deadline of their fetches


class _Fetching:
    def __init__(self, num_ranks: int) -> None:
        self.answers: dict[int, int] = {}  # number of leading images that arrived, by rank
        self.num_ranks = num_ranks
        self.failure = ""  # why the fetch failed at some rank
        self.done: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def add(self, answer: EmbeddingsFetched) -> None:
        self.answers[answer.rank] = answer.num_images
        self.failure = self.failure or answer.failure
        if len(self.answers) == self.num_ranks and not self.done.done():
            self.done.set_result(min(self.answers.values()))


class EmbeddingClient:
    """Connects the host's jobs to the workers, over a socket that only embeddings use."""

    def __init__(self, num_ranks: int) -> None:
        self.awaited = AwaitedEmbeddings()
        self._num_ranks = num_ranks
        self._control: ControlServer | None = None
        self._fetching: dict[int, _Fetching] = {}

    async def listen(self, path: Path, on_lost: Callable[[WorkerLost], None]) -> None:
        self._control = ControlServer(self._on_message, on_lost)
        await self._control.listen(path)

    async def close(self) -> None:
        if self._control is not None:
            await self._control.close()

    async def landed(self, leg: int, request: Mapping[str, Any]) -> dict[str, Any]:
        """Wait for a request's embeddings. Returns the parameters that name them to vLLM.

        `request` is vLLM's input, which has images.
        """
        (hashes,) = request["mm_hashes"].values()
        (places,) = request["mm_placeholders"].values()
        lengths = [place.get_num_embeds() for place in places]
        images = dict(sorted(zip(hashes, lengths, strict=True), key=lambda image: image[1]))

        async def fetch(encoder: KvPeer, deadline_s: float) -> int:
            return await self._fetch(leg, images, encoder, deadline_s)

        num = await self.awaited.gather(leg, len(images), fetch)
        return {LANDED: landed_params(leg, list(images)[:num])} if num else {}

    async def _fetch(
        self, leg: int, images: Mapping[str, int], encoder: KvPeer, deadline_s: float
    ) -> int:
        """Let all ranks fetch. Returns for how many leading images all ranks have embeddings.

        `images` has each image's length in tokens, by name. Raises KvTransferFailed if the fetch
        failed at any rank, or if a rank did not answer in time.
        """
        assert self._control is not None
        fetching = self._fetching[leg] = _Fetching(self._num_ranks)
        order = FetchEmbeddings(
            leg,
            encoder.instance_id,
            encoder.incarnation,
            encoder.addresses[0],
            list(images),
            list(images.values()),
            deadline_s,
        )
        self._control.broadcast(order)
        try:
            done, _ = await asyncio.wait([fetching.done], timeout=deadline_s + _MARGIN_S)
        finally:
            del self._fetching[leg]
        num = fetching.done.result() if done else 0
        if not num:  # some rank may have embeddings, or receive them later
            self._control.broadcast(ForgetEmbeddings(leg))
        failure = fetching.failure if done else PullFailure.TIMEOUT
        if failure:
            raise KvTransferFailed("a rank could not fetch the embeddings", reason=failure)
        return num

    def forget(self, leg: int) -> None:
        """Drop the embeddings of a request that vLLM did not take."""
        self.awaited.forget(leg)
        if self._control is not None:
            self._control.broadcast(ForgetEmbeddings(leg))

    def _on_message(self, message: ToHost) -> None:
        if isinstance(message, EmbeddingsFetched) and message.leg in self._fetching:
            self._fetching[message.leg].add(message)
