"""Finds out how KV can travel from this machine: UCX's transports, and RDMA access to GPU memory.

From these facts, `core.kv.transfer.gpu_or_host` decides whether the arenas for KV are in the GPU's
memory or in the host's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import structlog

from pdmesh.core.kv.transfer.gpu_or_host import PathFacts, transports_of
from pdmesh.kv.transport.ucx_worker import context_info, is_local, options_for

log = structlog.get_logger(__name__)

# The kernel module that lets an RDMA device read a GPU's memory. UCX checks the same paths.
_PEER_MEMORY: Final = (
    Path("/sys/kernel/mm/memory_peers/nv_mem/version"),
    Path("/sys/module/nvidia_peermem/version"),
)


def path_facts(device: Any, host: str, arena_bytes: int) -> PathFacts:
    """The facts for sending the KV cache of a torch device from the network address `host`.

    This makes a UCX context with the options and the environment that the agent will use. Raises
    KvTransferFailed if UCX does not start.
    """
    kind = device.type
    if kind == "cpu":
        return host_facts(host)
    import torch

    transports = transports_of(context_info(options_for(host, reaches_gpu=True)))

    free_bytes, _ = torch.cuda.mem_get_info(device)
    return PathFacts(
        kind, is_local(host), transports, gpu_reader(device), arena_bytes, int(free_bytes)
    )


def host_facts(host: str) -> PathFacts:
    """The facts of an engine without a GPU."""
    return PathFacts("cpu", is_local(host), transports_of(context_info(options_for(host))))


def gpu_reader(device: Any) -> str:
    """How RDMA devices reach the GPU's memory: nvidia_peermem, DMA-BUF, or empty for no way."""
    if any(path.exists() for path in _PEER_MEMORY):
        return "nvidia_peermem"
    return "DMA-BUF" if _has_dma_buf(device.index or 0) else ""


def _has_dma_buf(index: int) -> bool:
    try:
        from cuda.bindings import driver

        attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED
        status, value = driver.cuDeviceGetAttribute(attribute, index)
    except Exception as error:  # noqa: BLE001  no driver, or another one: DMA-BUF is not used
        log.info("kv.no_dma_buf", error=str(error))
        return False
    return not int(status) and bool(value)
