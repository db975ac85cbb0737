"""vLLM accepts the arguments for a data-parallel domain (S121, S122).

A domain consists of instances that compute one model together. The tests start no engine, because
vLLM's communicator for CPUs cannot exchange tokens between experts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pdmesh.core.model import DomainRank
from pdmesh.engine.vllm.child.domain import domain_arguments, external_mode
from pdmesh.errors import EngineMisconfigured
from tests.fakes.tiny_llama import write_tiny_llama

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.nightly,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("default"),  # vLLM emits warnings
]
RANK = DomainRank("chat-d7", 1, 2, "127.0.0.1:29655")


def arguments(model_dir: Path) -> dict[str, Any]:
    return {
        "model": str(model_dir),
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "block_size": 32,
        "max_model_len": 256,
        "distributed_executor_backend": "uni",
    }


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Qwen2MoeConfig

    folder = tmp_path_factory.mktemp("tiny-mixture")
    config = Qwen2MoeConfig(
        vocab_size=512, hidden_size=256, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, moe_intermediate_size=64,
        shared_expert_intermediate_size=64, num_experts=4, num_experts_per_tok=2,
        architectures=["Qwen2MoeForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(folder)
    return folder


def test_a_rank_of_a_dense_model_is_an_engine_of_its_own(dense: Path) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    assert domain_arguments(RANK, "cpu", arguments(dense)) == {}
    with pytest.raises(ValueError, match="Non-MoE models do not support external data parallel"):
        AsyncEngineArgs(**arguments(dense), **external_mode(RANK)).create_engine_config()


def test_ranks_of_a_mixture_of_experts_meet_at_rank_0_with_expert_parallelism(
    mixture: Path,
) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    told = domain_arguments(RANK, "cuda", arguments(mixture))
    made = AsyncEngineArgs(
        **arguments(mixture), **told, enable_expert_parallel=True
    ).create_engine_config()
    parallel = made.parallel_config
    assert (parallel.data_parallel_size, parallel.data_parallel_rank) == (2, 1)
    assert (parallel.data_parallel_master_ip, parallel.data_parallel_rpc_port) == (
        "127.0.0.1", 29655
    )  # fmt: skip
    assert parallel.data_parallel_external_lb, "the mesh chooses the rank of each request"
    assert parallel.enable_expert_parallel


def test_a_mixture_of_experts_on_a_cpu_is_refused_in_one_line(mixture: Path) -> None:
    with pytest.raises(EngineMisconfigured, match="set dp_size of the service to 1"):
        domain_arguments(RANK, "cpu", arguments(mixture))
