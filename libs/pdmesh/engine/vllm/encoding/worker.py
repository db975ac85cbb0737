"""Publishes image embeddings in a worker of an encoder, and fetches them in a worker of a prefill.

A KV agent that serves only embeddings moves the bytes between instances. The agent's fingerprint
must be equal at both ends, and includes a digest of the model. One thread computes steps, one
listens to the host, and one is the agent's. The host is the part of the instance outside the
engine. A leg is a request's stay on this instance.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from itertools import groupby
from typing import TYPE_CHECKING, Any

import structlog

from pdmesh import failpoints
from pdmesh.core.kv.transfer.ticket import PullFailure
from pdmesh.engine.vllm.encoding.plan import EmbeddingPlan
from pdmesh.engine.vllm.messages import (
    EmbeddingsFetched,
    EmbeddingsHeld,
    FetchEmbeddings,
    ForgetEmbeddings,
    RankHello,
    ToWorker,
    WorkerControl,
)
from pdmesh.engine.vllm.model.fingerprint import digest
from pdmesh.errors import KvTransferFailed
from pdmesh.kv.agent.agent import KvAgent
from pdmesh.kv.agent.arena_memory import host_memory
from pdmesh.kv.agent.thread import AgentThread
from pdmesh.kv.agent.types import AgentIdentity
from pdmesh.kv.embeddings.names import embedding_name
from pdmesh.kv.embeddings.pool import EmbeddingPool
from pdmesh.kv.transport.base import ByteArray
from pdmesh.kv.transport.ucx import UcxTransport

if TYPE_CHECKING:
    import torch

log = structlog.get_logger(__name__)


class EmbeddingWorker:
    """`width` is the length of one token's embedding. A prefill's pool is empty: it has 0 bytes."""

    def __init__(
        self, config: Mapping[str, Any], rank: int, num_ranks: int, width: int, dtype: torch.dtype
    ) -> None:
        failpoints.arm(config["failpoints"])
        self._rank, self._width, self._dtype = rank, width, dtype
        self._pool = EmbeddingPool(config["pool_bytes"])
        self._landed: dict[int, dict[str, torch.Tensor]] = {}  # by leg
        self._fetching: set[int] = set()  # legs whose fetch the host awaits
        self._lock = threading.Lock()
        fingerprint = digest((config["computation"], str(width), str(dtype)))
        identity = AgentIdentity(
            config["instance_id"], config["incarnation"], fingerprint, rank, config["group_id"]
        )
        self._agent = AgentThread(
            lambda: KvAgent(
                UcxTransport(config["kv_host"]), identity, host_memory(0, 0, self._pool), _ignore
            ),
            name="embeddings",
            die=_die,
        )
        self._control = WorkerControl(config["control_path"], self._on_message, _exit)
        address = self._agent.start()
        hello = RankHello(rank, num_ranks, os.getpid(), address, fingerprint, 0, 0, 0)
        self._control.send(hello)

    def close(self) -> None:
        self._agent.close()
        self._control.close()

    # -- an encoder -------------------------------------------------------------------------------

    def publish(self, identifier: str, encoded: torch.Tensor) -> None:
        """Put an image's embedding into the pool for prefills to fetch. Report it to the host."""
        name = embedding_name(identifier)
        if name in self._pool:
            return
        left: Sequence[bytes] | None = None
        if encoded.dim() == 2 and encoded.shape[1] == self._width and encoded.dtype is self._dtype:
            made = encoded.detach().cpu().contiguous().clone()
            if failpoints.hit("encode.published") == "zero-embeddings":
                made.zero_()
            left = self._pool.add(name, _bytes_of(made))
        else:
            log.warning("vllm.embeddings.other_form", shape=tuple(encoded.shape))
        if left is None:
            self._control.send(EmbeddingsHeld(self._rank, [], [name]))
        else:
            self._control.send(EmbeddingsHeld(self._rank, [name], list(left)))

    # -- a prefill --------------------------------------------------------------------------------

    def load(self, plan: EmbeddingPlan, encoder_cache: dict[str, torch.Tensor]) -> None:
        with self._lock:
            for leg, identifier in plan.loads:
                if identifier not in encoder_cache:
                    encoder_cache[identifier] = self._placed(self._landed[leg][identifier])
            for leg in plan.dropped_legs:
                self._landed.pop(leg, None)

    @staticmethod
    def _placed(embedding: torch.Tensor) -> torch.Tensor:
        from vllm.platforms import current_platform

        if current_platform.device_type in ("", "cpu"):
            return embedding
        return embedding.to(current_platform.device_type, non_blocking=False)

    def _on_message(self, message: ToWorker) -> None:
        match message:
            case FetchEmbeddings():
                self._fetch(message)
            case ForgetEmbeddings():
                with self._lock:
                    self._fetching.discard(message.leg)
                    self._landed.pop(message.leg, None)

    def _fetch(self, asked: FetchEmbeddings) -> None:
        """Fetch into tensors of this leg alone, so that a late write after a failure does no harm.

        One fetch can bring only embeddings of the same length. So there is one fetch for each
        length, and all of them run at the same time.
        """
        import torch

        self._fetching.add(asked.leg)
        made = {
            name: torch.empty((num_tokens, self._width), dtype=self._dtype)
            for name, num_tokens in zip(asked.identifiers, asked.num_tokens, strict=True)
        }
        lengths = groupby(made.items(), key=lambda each: len(each[1]))
        groups = [dict(group) for _, group in lengths]
        fetches = [self._begin_fetch(asked, group) for group in groups]
        num_left = len(fetches)

        def done(_: Future[Sequence[bytes]]) -> None:
            nonlocal num_left
            with self._lock:
                num_left -= 1
                is_last = num_left == 0
            if is_last:
                num, failure = first_fetched(fetches, [len(group) for group in groups])
                self._fetched(asked.leg, dict(list(made.items())[:num]), failure)

        for fetching in fetches:
            fetching.add_done_callback(done)

    def _begin_fetch(
        self, asked: FetchEmbeddings, into: Mapping[str, torch.Tensor]
    ) -> Future[Sequence[bytes]]:
        try:
            return self._agent.fetch(
                asked.address,
                asked.incarnation,
                [embedding_name(identifier) for identifier in into],
                [_bytes_of(tensor) for tensor in into.values()],
                deadline_s=asked.deadline_s,
                on_freed=lambda: None,
                source=asked.instance_id,
            )
        except KvTransferFailed as error:
            failed: Future[Sequence[bytes]] = Future()
            failed.set_exception(error)
            return failed

    def _fetched(self, leg: int, landed: dict[str, torch.Tensor], failure: str) -> None:
        with self._lock:
            if leg in self._fetching:
                self._fetching.discard(leg)
                if landed:
                    self._landed[leg] = landed
        self._control.send(EmbeddingsFetched(self._rank, leg, len(landed), failure))


def first_fetched(
    fetches: Sequence[Future[Sequence[bytes]]], sizes: Sequence[int]
) -> tuple[int, str]:
    """Returns the number of leading images that arrived, and why a fetch failed.

    If any fetch failed, the number is 0. All `fetches` have ended, and `sizes` has the number of
    images of each fetch. A fetch may bring fewer images, because the encoder may have evicted some.
    """
    for fetched in fetches:
        if fetched.cancelled():
            return 0, PullFailure.CLOSING
        if (error := fetched.exception()) is not None:
            return 0, getattr(error, "reason", KvTransferFailed.default_reason)
    num = 0
    for fetched, size in zip(fetches, sizes, strict=True):
        num += len(fetched.result())
        if len(fetched.result()) < size:
            break
    return num, ""


def _bytes_of(tensor: torch.Tensor) -> ByteArray:
    """A view of the tensor's bytes, not a copy."""
    import torch

    found: ByteArray = tensor.view(torch.uint8).reshape(-1).numpy()
    return found


def _ignore(event: object) -> None:
    """Ignore the agent's events, because a fetch leaves nothing that must be freed here."""


def _die(error: BaseException) -> None:
    log.critical("vllm.worker.died", exc_info=error)
    os._exit(1)


def _exit() -> None:
    """Exit at once, because the host is gone."""
    os._exit(1)
