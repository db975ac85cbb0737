"""Our loader in vLLM's registry. vLLM chooses the weight files, and this loader reads them.

vLLM imports this module in each worker before it loads a model, because a setting names
`WorkerExtension`. vLLM itself reads the files if they are not safetensors files, if the ranks are
on several nodes, or if an option asks for a method of vLLM. LoRA adapters have another loader.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import structlog
import torch
import torch.distributed as dist
from vllm.config.load import LoadConfig
from vllm.distributed.parallel_state import get_tp_group, in_the_same_node_as
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.ep_weight_filter import should_skip_weight

from pdmesh.core.loading.weight_files import in_order, parse_index
from pdmesh.engine.vllm.loading.choice import LOAD_FORMAT
from pdmesh.engine.vllm.loading.node_ranks import LoneRank, NodeRanks, TorchRanks
from pdmesh.engine.vllm.loading.weight_stream import WeightStream

log = structlog.get_logger(__name__)


class WorkerExtension:
    """Makes vLLM's workers import this module, and adds nothing to the workers."""


@register_model_loader(LOAD_FORMAT)
class FileOrderLoader(DefaultModelLoader):
    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(replace(load_config, load_format="auto"))

    def _get_weights_iterator(self, source: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Like vLLM's method. `source` is a `DefaultModelLoader.Source`."""
        ranks = node_ranks()
        folder, paths, is_safetensors, index_file = self._prepare_weights(
            source.model_or_path,
            source.subfolder,
            source.revision,
            source.fall_back_to_pt,
            source.allow_patterns_overrides,
        )
        is_ours = (
            is_safetensors
            and source.is_unused_weight is None
            and self._encoder_only_lm_prefixes is None
            and self.load_config.safetensors_load_strategy is None
            and not self.load_config.model_loader_extra_config.get("enable_multithread_load")
        )
        if ranks is None or not is_ours:
            return iter(super()._get_weights_iterator(source))
        index = Path(folder, index_file)
        stream = WeightStream(
            Path(folder),
            in_order(Path(path).name for path in paths),
            parse_index(index.read_bytes(), index_file) if index.is_file() else None,
            ranks,
        )
        self.counter_before_loading_weights = time.perf_counter()  # vLLM logs the time since
        return self._named(stream, source.prefix, ranks)

    def _named(
        self, stream: WeightStream, prefix: str, ranks: NodeRanks
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in stream:
            if not should_skip_weight(name, self.local_expert_ids):
                yield prefix + name, tensor
        if ranks.is_reader:
            log.info("vllm.weights_read", **asdict(stream.report))


def node_ranks() -> NodeRanks | None:
    """This worker's tensor-parallel ranks. None if they are on several nodes.

    All of these ranks must call this function.
    """
    group = get_tp_group()
    if group.world_size == 1:
        return LoneRank()
    if not all(in_the_same_node_as(group.cpu_group)):
        return None
    return _ranks_of(tuple(dist.get_process_group_ranks(group.cpu_group)))


@functools.cache
def _ranks_of(members: tuple[int, ...]) -> TorchRanks:
    """One object for the process's life: the same ranks load a model and its draft model."""
    return TorchRanks(members)
