from __future__ import annotations

from pathlib import Path

from pdmesh.engine.vllm.config import CPU_STEP_TOKENS
from pdmesh.engine.vllm.pooling.config import VllmPoolingConfig, pooling_arguments


def config(device: str = "cpu", max_num_batched_tokens: int = 0) -> VllmPoolingConfig:
    return VllmPoolingConfig(
        "i", 1, Path("/m"), "m", device=device, max_num_batched_tokens=max_num_batched_tokens
    )


def test_a_step_on_a_cpu_is_short_unless_an_input_cannot_be_computed_in_parts() -> None:
    assert config().step_tokens(4096, is_chunked=True) == CPU_STEP_TOKENS
    assert config().step_tokens(4096, is_chunked=False) == 4096
    assert config().step_tokens(128, is_chunked=False) == CPU_STEP_TOKENS


def test_on_a_gpu_vllm_chooses_the_step_unless_it_is_set() -> None:
    assert config("cuda").step_tokens(4096, is_chunked=False) == 0
    assert config("cuda", 1024).step_tokens(4096, is_chunked=False) == 4096
    assert config("cuda", 1024).step_tokens(4096, is_chunked=True) == 1024


def test_vllm_gets_a_pooling_model_without_a_tokenizer_or_a_connector() -> None:
    arguments = pooling_arguments(config())
    assert (arguments["runner"], arguments["convert"]) == ("pooling", "auto")
    assert arguments["skip_tokenizer_init"] is True
    assert not any(name.startswith("kv_transfer") for name in arguments)
