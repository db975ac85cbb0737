"""Chooses how to access a rank's paged KV cache, by its device and whether heads are separable."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pdmesh.engine.vllm.connector.worker.cache_layout import CacheLayout, block_rows
from pdmesh.engine.vllm.connector.worker.caches import PagedCaches
from pdmesh.engine.vllm.connector.worker.host_caches import HostCaches, HostHeads, dense_rows


def paged_caches(
    kv_caches: Mapping[str, torch.Tensor], layout: CacheLayout, num_blocks: int
) -> PagedCaches:
    caches = list(kv_caches.values())
    if caches[0].device.type != "cpu":
        # this import needs Triton, which only a machine with a GPU has
        from pdmesh.engine.vllm.connector.worker.device_caches import (
            DeviceCaches,
        )

        return DeviceCaches(caches, layout.where)
    if layout.is_opaque:
        return HostCaches([block_rows(cache, num_blocks).numpy() for cache in caches])
    if layout.where.is_dense:
        return HostCaches(dense_rows(caches, layout.where), layout.where.heads.count)
    return HostHeads(caches, layout.where)
