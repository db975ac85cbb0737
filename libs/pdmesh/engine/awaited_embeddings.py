"""Makes a prefill wait for the embeddings of its images, and fetches them from the encoder.

An encoder is an instance that makes the embeddings of images. One deadline bounds both the
encoder's work and the fetch. After the deadline the prefill's engine encodes the images itself. So
an encoder that dies or hangs delays a request by about `ENCODE_WAIT_S` at most (S130). After
several failed fetches in a row, no prompt fetches from that encoder for a while
(`AvoidedEncoders`).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

import structlog

from pdmesh.core.deadlines import ENCODE_WAIT_S
from pdmesh.core.images.avoided_encoders import AvoidedEncoders
from pdmesh.core.model import PeerId
from pdmesh.engine.base import KvPeer
from pdmesh.errors import KvTransferFailed

log = structlog.get_logger(__name__)

_LEAST_FETCH_S: Final = 0.1  # a fetch has this time even if the encoder answered at the deadline

# Takes the encoder and the seconds that a fetch may take. Returns the number of the prompt's
# leading images whose embeddings are here now. Raises KvTransferFailed if the fetch failed.
FetchEmbeddings = Callable[[KvPeer, float], Awaitable[int]]


class EmbeddingOutcome(Enum):
    """How the wait for one image's embeddings ended."""

    FETCHED = "fetched"
    NOT_MADE = "not_made"  # the encoder refused, failed or died
    LATE = "late"  # the encoder did not answer in time
    LOST = "lost"  # the fetch failed, or the encoder had evicted the embeddings
    SKIPPED = "skipped"  # the encoder is avoided, because earlier fetches failed


@dataclass(slots=True)
class _Wait:
    until: float
    told: asyncio.Future[KvPeer | None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class AwaitedEmbeddings:
    """The waits of an engine's prefills, one per leg (a request's stay on this instance).

    `expect` begins a wait. `tell` passes on the encoder's answer, before or during `gather`.
    `gather` or `forget` ends the wait.
    """

    def __init__(self, patience_s: float = ENCODE_WAIT_S) -> None:
        self._patience_s = patience_s
        self._waits: dict[int, _Wait] = {}
        self._counts: Counter[EmbeddingOutcome] = Counter()  # images
        self.num_gathered = 0  # waits that ended; each counts as a sign of the engine's work
        self._sources = AvoidedEncoders()

    def __len__(self) -> int:
        return len(self._waits)

    def __contains__(self, leg: int) -> bool:
        return leg in self._waits

    def expect(self, leg: int) -> None:
        self._waits[leg] = _Wait(time.monotonic() + self._patience_s)

    def tell(self, leg: int, encoder: KvPeer | None) -> None:
        wait = self._waits.get(leg)
        if wait is not None and not wait.told.done():
            wait.told.set_result(encoder)

    def forget(self, leg: int) -> None:
        """End the wait of a leg that is over."""
        self.tell(leg, None)
        self._waits.pop(leg, None)

    async def gather(self, leg: int, num_images: int, fetch: FetchEmbeddings) -> int:
        """Wait for the encoder, then fetch.

        Returns the number of leading images that have embeddings.
        """
        wait = self._waits[leg]
        try:
            left_s = max(0.0, wait.until - time.monotonic())
            done, _ = await asyncio.wait([wait.told], timeout=left_s)
            encoder = wait.told.result() if done else None
            if encoder is None:
                missed = EmbeddingOutcome.NOT_MADE if done else EmbeddingOutcome.LATE
                self._counts[missed] += num_images
                return 0
            source = PeerId(encoder.instance_id, encoder.incarnation)
            if not self._sources.may_fetch(source, time.monotonic()):
                self._counts[EmbeddingOutcome.SKIPPED] += num_images
                return 0
            left_s = max(_LEAST_FETCH_S, wait.until - time.monotonic())
            num = await self._fetched(source, fetch(encoder, left_s))
            self._counts[EmbeddingOutcome.FETCHED] += num
            self._counts[EmbeddingOutcome.LOST] += num_images - num
            return num
        finally:
            self._waits.pop(leg, None)
            self.num_gathered += 1

    async def _fetched(self, source: PeerId, fetching: Awaitable[int]) -> int:
        """Fetch, and note the outcome for `AvoidedEncoders`.

        Returns the number of images whose embeddings arrived.
        """
        try:
            num = await fetching
        except KvTransferFailed as error:
            log.info("images.not_fetched", encoder=source.instance_id, reason=error.reason)
            if self._sources.failed(source, error.reason, time.monotonic()):
                log.warning("images.encoder_avoided", encoder=source.instance_id)
            return 0
        self._sources.fetched(source)
        return num

    @property
    def avoided(self) -> tuple[PeerId, ...]:
        """For `EngineStats.avoided_encoders`."""
        return tuple(self._sources.avoided(time.monotonic()))

    def numbers(self) -> dict[str, float]:
        """For `EngineStats.extra`."""
        return {f"num_embeddings_{o.value}": self._counts[o] for o in EmbeddingOutcome}
