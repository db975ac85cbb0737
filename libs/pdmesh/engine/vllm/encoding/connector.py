"""The connector that moves image embeddings from an encoder to the prefills that need them.

vLLM loads `PdmeshEcConnector` by `ec_connector_module_path`, once in its scheduler and once in each
worker. The class passes vLLM's calls on to `EmbeddingPlanner` and `EmbeddingWorker`. An encoder
makes embeddings and publishes them in a pool. A prefill uses the embeddings that were fetched for a
request, and encodes the other images itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
)

from pdmesh.engine.vllm.encoding.plan import EmbeddingPlan, EmbeddingPlanner
from pdmesh.engine.vllm.encoding.worker import EmbeddingWorker

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class EmbeddingMetadata(ECConnectorMetadata):
    """Carries one step's plan to the workers.

    `images` are vLLM's names of the images in the step's new requests.
    """

    def __init__(self, plan: EmbeddingPlan, images: tuple[str, ...]) -> None:
        self.plan, self.images = plan, images


class PdmeshEcConnector(ECConnectorBase):
    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        super().__init__(vllm_config, role)
        self._planner = EmbeddingPlanner()
        self._worker: EmbeddingWorker | None = None
        if role is ECConnectorRole.WORKER:
            model, parallel = vllm_config.model_config, vllm_config.parallel_config
            assert vllm_config.ec_transfer_config is not None
            self._worker = EmbeddingWorker(
                vllm_config.ec_transfer_config.ec_connector_extra_config,
                rank=parallel.rank,
                num_ranks=parallel.world_size,
                width=model.get_inputs_embeds_size(),
                dtype=model.dtype,
            )

    # -- scheduler --------------------------------------------------------------------------------

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        """vLLM calls this right before it calls `has_cache_item` for the request's images."""
        self._planner.consider(request.kv_transfer_params)
        return True

    def has_cache_item(self, identifier: str) -> bool:
        return self._planner.has(identifier)

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        self._planner.allocated(request.mm_features[index].identifier)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> ECConnectorMetadata:
        images = tuple(
            feature.identifier
            for request in scheduler_output.scheduled_new_reqs
            for feature in request.mm_features or ()
        )
        return EmbeddingMetadata(
            self._planner.take(scheduler_output.total_num_scheduled_tokens), images
        )

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        self._planner.finished(request.kv_transfer_params)
        return False, None

    # -- worker -----------------------------------------------------------------------------------

    @property
    def worker(self) -> EmbeddingWorker:
        assert self._worker is not None, "a worker's method"
        return self._worker

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        self.worker.load(self._metadata().plan, encoder_cache)

    def start_save_caches(self, **kwargs: Any) -> None:
        """Publish embeddings that vLLM still has in its cache.

        The pool may have evicted them, and vLLM does not encode these images again.
        """
        encoder_cache: dict[str, torch.Tensor] = kwargs["encoder_cache"]
        for identifier in self._metadata().images:
            if identifier in encoder_cache:
                self.worker.publish(identifier, encoder_cache[identifier])

    def save_caches(
        self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any
    ) -> None:
        if self.is_producer:
            self.worker.publish(mm_hash, encoder_cache[mm_hash])

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()

    def _metadata(self) -> EmbeddingMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, EmbeddingMetadata)
        return metadata
