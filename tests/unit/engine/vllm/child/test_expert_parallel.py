from __future__ import annotations

from types import SimpleNamespace

import pytest

from pdmesh.engine.vllm.child.expert_parallel import check_experts
from pdmesh.errors import EngineMisconfigured


def config(
    *, device: str = "cpu", shares: bool = True, is_moe: bool = True, num_ranks: int = 2
) -> SimpleNamespace:
    return SimpleNamespace(
        device_config=SimpleNamespace(device_type=device),
        model_config=SimpleNamespace(is_moe=is_moe),
        parallel_config=SimpleNamespace(enable_expert_parallel=shares, world_size=num_ranks),
    )


@pytest.mark.req("S122")
def test_whole_experts_on_the_ranks_of_a_cpu_are_refused() -> None:
    with pytest.raises(EngineMisconfigured) as caught:
        check_experts(config())
    assert caught.value.field == "engine_args.enable_expert_parallel"
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    "changed", [{"device": "cuda"}, {"shares": False}, {"is_moe": False}, {"num_ranks": 1}]
)
def test_all_else_starts(changed: dict[str, object]) -> None:
    check_experts(config(**changed))  # type: ignore[arg-type]
