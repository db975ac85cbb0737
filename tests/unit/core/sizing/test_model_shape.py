"""Parameters and KV bytes equal those that the models' authors state.

Models of unknown kinds are refused.
"""

from __future__ import annotations

from typing import Any

import pytest

from loadtests.sizing.scenes import CONFIGS
from pdmesh.core.sizing.model_shape import model_shape
from pdmesh.core.sizing.problem import SizingProblem

DEEPSEEK_V3: dict[str, Any] = {
    "hidden_size": 7168, "intermediate_size": 18432, "num_attention_heads": 128,
    "num_key_value_heads": 128, "num_hidden_layers": 61, "vocab_size": 129280,
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048, "first_k_dense_replace": 3,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}  # fmt: skip
LLAMA: dict[str, Any] = dict(CONFIGS["Llama-3.1-8B"])


@pytest.mark.parametrize(
    ("config", "billions", "active", "kv_kib"),
    [
        (LLAMA, 8.03, 8.03, 128),
        (CONFIGS["Llama-3.1-70B"], 70.6, 70.6, 320),
        (CONFIGS["Qwen3-32B"], 32.8, 32.8, 256),
        (CONFIGS["Qwen3-30B-A3B"], 30.5, 3.3, 96),
        (DEEPSEEK_V3, 671, 37, 68.6),
    ],
)
def test_parameters_are_those_of_the_model_card(
    config: dict[str, Any], billions: float, active: float, kv_kib: float
) -> None:
    shape = model_shape(config)
    assert shape.num_params / 1e9 == pytest.approx(billions, rel=0.01)
    used = shape.active_params + shape.head_params + shape.embedding_params
    assert used / 1e9 == pytest.approx(active, rel=0.03)
    assert shape.kv_token_bytes / 1024 == pytest.approx(kv_kib, rel=0.01)


def test_numbers_decide_bytes_and_the_unit_that_multiplies() -> None:
    plain = model_shape(LLAMA)
    fp8 = model_shape({**LLAMA, "quantization_config": {"quant_method": "fp8"}})
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128}
    int4 = model_shape({**LLAMA, "quantization_config": awq})
    assert (plain.compute, fp8.compute, int4.compute) == ("bf16", "fp8", "bf16")
    assert plain.weight_bytes == pytest.approx(16.06e9, rel=0.01)
    assert plain.dense_params == pytest.approx(fp8.dense_bytes - 2 * fp8.head_params)
    assert int4.weight_bytes < 0.45 * plain.weight_bytes
    by_channel = model_shape({**LLAMA, "quantization_config": {**awq, "group_size": -1}})
    assert 0.95 * int4.weight_bytes < by_channel.weight_bytes < int4.weight_bytes
    with pytest.raises(SizingProblem, match="group_size"):
        model_shape({**LLAMA, "quantization_config": {**awq, "group_size": 0}})
    assert plain.with_fp8_kv().kv_token_bytes == plain.kv_token_bytes / 2


def test_heads_are_copied_where_there_are_more_ranks_than_heads() -> None:
    shape = model_shape(LLAMA)  # the model has 8 KV heads
    assert shape.rank_kv_bytes(8) == shape.kv_token_bytes / 8
    assert shape.rank_kv_bytes(16) == shape.kv_token_bytes / 8
    latent = model_shape(DEEPSEEK_V3)
    assert latent.rank_kv_bytes(8) == latent.kv_token_bytes


def test_the_files_size_wins_and_a_difference_is_told() -> None:
    same = model_shape(LLAMA, weight_bytes=16_060_000_000)
    assert (same.weight_bytes, same.notes) == (16_060_000_000, ())
    other = model_shape(LLAMA, weight_bytes=8_000_000_000)
    assert "+101%" in other.notes[0]


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "big"}, "hidden_size"),
        ({"num_key_value_heads": 7}, "num_key_value_heads"),
        ({"torch_dtype": "int3"}, "torch_dtype"),
        ({"quantization_config": {"quant_method": "magic"}}, "quant_method"),
        ({"layer_types": ["linear_attention"]}, "layer_types"),
        ({"ssm_state_size": 16}, "ssm_state_size"),
        ({"full_attention_interval": 4}, "full_attention_interval"),
        ({"linear_attn_config": {"kda_layers": [1]}}, "linear_attn_config"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"model_type": "gpt2"}, "model_type"),
        ({"num_experts": 4, "num_experts_per_tok": 8}, "num_experts_per_tok"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"hidden_size": 8}, "hidden_size"),
        ({"layer_types": 5}, "layer_types"),
        ({"mlp_only_layers": 5, "num_experts": 8, "num_experts_per_tok": 2}, "mlp_only_layers"),
        ({"decoder_sparse_step": 0, "num_experts": 8, "num_experts_per_tok": 2}, "sparse_step"),
    ],
)
def test_what_is_not_planned_for_is_refused_by_its_field(
    changed: dict[str, Any], field: str
) -> None:
    with pytest.raises(SizingProblem, match=field) as refused:
        model_shape({**LLAMA, **changed})
    assert refused.value.field == "model"


def test_a_model_that_sees_is_counted_without_its_eyes() -> None:
    shape = model_shape({"torch_dtype": "bfloat16", "text_config": LLAMA})
    assert shape.num_params == model_shape(LLAMA).num_params
    assert "text_config" in shape.notes[0]
