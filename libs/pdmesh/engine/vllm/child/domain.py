"""vLLM's arguments for a domain: instances that compute one model together, data-parallel.

Each instance is one rank of the domain, with its own engine process. vLLM calls this its external
mode. The ranks of a mixture of experts share the experts, so their engines connect to rank 0 and
step together. The ranks of a dense model have nothing to share. For them, vLLM refuses the external
mode ("launch independent vLLM instances without --data-parallel-* arguments"), so each rank has an
independent engine.
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
    """Keyword arguments of `AsyncEngineArgs` for the domain. vLLM mixes their types, hence Any.

    `arguments` are the engine's other arguments. Raises EngineMisconfigured for a mixture of
    experts on a CPU.
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
    """vLLM's arguments for its external mode, in which the caller chooses each request's rank."""
    host, _, port = domain.address.rpartition(":")
    return {
        "data_parallel_size": domain.dp_size,
        "data_parallel_rank": domain.dp_rank,
        "data_parallel_address": host.strip("[]"),
        "data_parallel_rpc_port": int(port),
    }
