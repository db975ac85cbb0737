"""vLLM's arguments for a data-parallel domain: its external mode, one engine process per rank.

The ranks of a mixture of experts share the experts, so their engines connect to rank 0 and step
together. The ranks of a dense model have nothing to share. vLLM refuses the external mode for them
("launch independent vLLM instances without --data-parallel-* arguments"), so each is an engine of
its own.
"""

from __future__ import annotations

from typing import Any

import structlog

from pdmesh.core.model import DomainRank
from pdmesh.engine.vllm.child.startup import model_config
from pdmesh.errors import EngineMisconfigured

log = structlog.get_logger(__name__)


def domain_arguments(
    domain: DomainRank | None, device: str, arguments: dict[str, Any]
) -> dict[str, Any]:
    """More keyword arguments of `AsyncEngineArgs` (Any: vLLM's own mixture of types).

    `arguments` are the others. Raises EngineMisconfigured for a mixture of experts on a CPU.
    """
    if domain is None:
        return {}
    shares_experts = bool(model_config(arguments).is_moe)
    log.info("vllm.domain", dp_rank=domain.dp_rank, dp_size=domain.dp_size, meets=shares_experts)
    if not shares_experts:
        return {}
    if device == "cpu":
        raise EngineMisconfigured(
            "a mixture of experts cannot be data-parallel on a CPU: vLLM's communicator for CPUs "
            "has no all_gatherv; set dp_size of the service to 1 (docs/groups.md)",
            reason="MODEL_UNSUPPORTED",
        )
    return external_mode(domain)


def external_mode(domain: DomainRank) -> dict[str, Any]:
    """With a `data_parallel_rank`, vLLM leaves it to its caller to choose each request's rank."""
    host, _, port = domain.address.rpartition(":")
    return {
        "data_parallel_size": domain.dp_size,
        "data_parallel_rank": domain.dp_rank,
        "data_parallel_address": host.strip("[]"),
        "data_parallel_rpc_port": int(port),
    }
