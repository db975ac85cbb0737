"""Writes a planned deployment as a desired state, the groups that a mesh should have.

`pdmesh apply` reads this data as YAML.
"""

from __future__ import annotations

from typing import Any, Final

from pdmesh.core.moves.move_refusal import MIN_PER_SCENARIO
from pdmesh.core.sizing.deployment import Deployment, PoolSize
from pdmesh.core.sizing.traffic import BLOCK, Goals, Traffic

NAME: Final = "planned"
_SCENARIO: Final = "default"  # the scenario of requests that name none
_MIB: Final = 2**20
_MARGIN: Final = 1.25  # a request longer than this many times the longest planned one is refused


def desired_state(
    deployment: Deployment, traffic: Traffic, goals: Goals, model_dir: str = "", max_len: int = 0
) -> dict[str, Any]:
    """The desired state of the deployment.

    `max_len` is the model's own limit of prompt and answer in tokens; 0 means that it is unknown.
    """
    roles = ("fusion",) if deployment.is_fusion else ("prefill", "decode")
    sizes = dict(zip(roles, deployment.pools, strict=True))
    longest = _blocks(int(_MARGIN * traffic.longest))
    length = min(longest, max_len) if max_len else longest
    service: dict[str, Any] = {
        "options": {"block_size": BLOCK, "max_model_len": length},
        "role_options": {role: _options(pool) for role, pool in sizes.items()},
    }
    if model_dir:
        service = {"model_dir": model_dir, **service}
    scenario: dict[str, Any] = {"service": NAME, "slo": {"ttft_s": goals.ttft_s}}
    if any(pool.count < MIN_PER_SCENARIO for pool in deployment.pools):
        scenario["allow_single"] = True
    return {
        "services": {NAME: service},
        "scenarios": {_SCENARIO: scenario},
        "groups": {NAME: {role: pool.count for role, pool in sizes.items()}},
    }


def _options(pool: PoolSize) -> dict[str, int]:
    return {
        "tensor_parallel_size": pool.kind.tp,
        "num_slots": pool.slots,
        "max_num_batched_tokens": pool.chunk,
        "kv_cache_bytes": pool.kind.kv_bytes // _MIB * _MIB,
    }


def _blocks(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK) * BLOCK
