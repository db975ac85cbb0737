"""The fingerprint names the format in which vLLM stores KV."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from pdmesh.core.kv.layout.compatibility import UNSCALED
from pdmesh.engine.vllm.connector.kv_facts import (
    BESIDE,
    CHECKPOINT,
    KvFacts,
    as_stage,
    kv_dtype,
    kv_facts,
    kv_scales,
    layers_by_stage,
    length_decides,
    rank_place,
)
from pdmesh.engine.vllm.connector.worker.cache_layout import known_axes


def vllm_config(stored: str, *scales: tuple[float, float]) -> Any:
    layers = {
        f"layer.{i}": SimpleNamespace(_k_scale_float=k, _v_scale_float=v)
        for i, (k, v) in enumerate(scales)
    }
    return SimpleNamespace(
        model_config=SimpleNamespace(
            dtype="torch.bfloat16",
            get_total_num_kv_heads=lambda: 8,
            use_mla=False,
            hf_text_config=SimpleNamespace(
                model_type="llama", rope_parameters={"rope_type": "default"}
            ),
            max_model_len=2048,
            quantization=None,
            get_sliding_window=lambda: None,
            disable_sliding_window=False,
            hf_overrides={},
        ),
        lora_config=None,
        device_config=SimpleNamespace(device_type="cpu"),
        cache_config=SimpleNamespace(cache_dtype=stored),
        compilation_config=SimpleNamespace(static_forward_context=layers, custom_ops=["all"]),
    )


@pytest.mark.req("S126")
@pytest.mark.parametrize(
    ("stored", "dtype"),
    [
        ("auto", "bfloat16"),
        ("float16", "float16"),
        ("fp8", "fp8_e4m3"),
        ("fp8_e5m2", "fp8_e5m2"),
        ("int8_per_token_head", "int8"),
    ],
)
def test_the_stored_format_has_one_name(stored: str, dtype: str) -> None:
    assert kv_dtype(stored, "bfloat16") == dtype


@pytest.mark.req("S126")
def test_scales_that_are_stored_elsewhere_are_part_of_the_name() -> None:
    ones, twos = [(1.0, 1.0)] * 2, [(1.0, 1.0), (1.0, 2.0)]
    assert kv_scales("auto", ones) == UNSCALED
    assert kv_scales("int8_per_token_head", ones) == BESIDE
    assert kv_scales("fp8", ones) == kv_scales("fp8_e5m2", ones)
    assert kv_scales("fp8", ones) != kv_scales("fp8", twos)


@pytest.mark.req("S126")
def test_facts_are_read_from_vllms_configuration() -> None:
    names = ["layer.0", "layer.1"]
    one = kv_facts(vllm_config("fp8", (1.0, 1.0), (0.5, 1.0)), names)
    assert (one.dtype, one.num_heads) == ("fp8_e4m3", 8)
    other = kv_facts(vllm_config("fp8", (1.0, 1.0), (0.5, 1.5)), names)
    assert one.scales != other.scales
    plain = kv_facts(vllm_config("auto", (1.0, 1.0), (1.0, 1.0)), names)
    assert plain == KvFacts("bfloat16", UNSCALED, 8, plain.computed, "")
    assert plain.computed == one.computed
    kernels = vllm_config("auto", (1.0, 1.0), (1.0, 1.0))
    for layer in kernels.compilation_config.static_forward_context.values():
        layer.attn_backend = SimpleNamespace(get_name=lambda: "FLASH_ATTN")
    assert kv_facts(kernels, names).backends == "FLASH_ATTN"


@pytest.mark.req("S120", "S126")
@pytest.mark.parametrize("stored", ["auto", "fp8", "int8_per_token_head"])
def test_stages_with_other_scales_have_one_name(stored: str) -> None:
    ones, twos = vllm_config(stored, (1.0, 1.0)), vllm_config(stored, (0.5, 2.0))
    first, second = (as_stage(kv_facts(each, ["layer.0"])) for each in (ones, twos))
    assert first == second
    assert (first.scales == CHECKPOINT) == (stored == "fp8")


@pytest.mark.req("S120")
def test_layers_are_shared_out_as_vllm_shares_them_out(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm.distributed.utils")

    def shared(num_layers: int, num_stages: int) -> tuple[int, ...]:
        return layers_by_stage(
            SimpleNamespace(
                model_config=SimpleNamespace(get_total_num_hidden_layers=lambda: num_layers),
                parallel_config=SimpleNamespace(pipeline_parallel_size=num_stages),
            )
        )

    assert shared(61, 1) == ()
    assert shared(30, 2) == (15, 15)
    assert shared(61, 2) == (31, 30)
    assert shared(61, 4) == (15, 15, 16, 15)
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "20,41")
    assert shared(61, 2) == (20, 41)
    with pytest.raises(ValueError, match="num_hidden_layers=60"):
        shared(60, 2)


@pytest.mark.req("S120")
def test_a_workers_place_is_read_from_vllms_configuration() -> None:
    pytest.importorskip("vllm.distributed.utils")
    place = rank_place(
        SimpleNamespace(
            model_config=SimpleNamespace(get_total_num_hidden_layers=lambda: 5),
            parallel_config=SimpleNamespace(pipeline_parallel_size=2, rank=2, world_size=4),
        )
    )
    assert (place.stage, place.rank_in_stage, place.stages) == (1, 0, (3, 2))


@pytest.mark.req("S80", "S126")
@pytest.mark.parametrize(
    "changes",
    [
        {"quantization": "fp8"},
        {"get_sliding_window": lambda: 1024},
        {"disable_sliding_window": True},
        {"hf_overrides": {"rope_theta": 5e5}},
        {"hf_overrides": vllm_config},
        {"hf_text_config": SimpleNamespace(rope_parameters={"rope_type": "linear", "factor": 2})},
    ],
)
def test_settings_that_change_the_results_of_equal_weights_change_the_name(changes: Any) -> None:
    plain, other = vllm_config("auto"), vllm_config("auto")
    vars(other.model_config).update(changes)
    assert kv_facts(plain, []).computed == kv_facts(vllm_config("auto"), []).computed
    assert kv_facts(plain, []).computed != kv_facts(other, []).computed


@pytest.mark.req("S80", "S126")
@pytest.mark.parametrize(
    ("model_type", "rope", "does"),
    [
        ("llama", {"rope_type": "default"}, False),
        ("llama", {"rope_type": "llama3", "factor": 8.0}, False),
        ("llama", None, False),
        ("phi3", {"rope_type": "longrope"}, True),
        ("qwen2", {"type": "dynamic", "factor": 4.0}, True),
        ("qwen3", {"rope_type": "yarn", "factor": 4.0}, True),
        ("gemma3_text", {"full_attention": {"rope_type": "linear"}}, False),
        ("gemma3_text", {"full_attention": {"rope_type": "of next year"}}, True),
        ("llama4_text", {"rope_type": "default"}, True),
    ],
)
def test_the_longest_prompt_counts_where_rope_is_scaled_by_it(
    model_type: str, rope: Any, does: bool
) -> None:
    assert length_decides(model_type, rope) is does
    short, long = vllm_config("auto"), vllm_config("auto")
    long.model_config.max_model_len = 131_072
    for config in (short, long):
        config.model_config.hf_text_config = SimpleNamespace(
            model_type=model_type, rope_parameters=rope
        )
    differ = kv_facts(short, []).computed != kv_facts(long, []).computed
    assert differ is does


@pytest.mark.req("S57")
@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((10, 4, 16, 256), "bhnc"),
        ((2, 10, 16, 4, 128), "kbnhc"),
        ((10, 2, 16, 4, 128), "bknhc"),
        ((20, 4, 8, 256), None),  # a block is split in two for a kernel
        ((10, 8, 16, 256), None),  # the number of heads differs from this rank's
        ((10, 1, 16, 576), None),  # latent attention has one head, and this model has four
    ],
)
def test_the_axes_of_a_gpu_cache_are_known_by_its_shape(
    shape: tuple[int, ...], axes: str | None
) -> None:
    assert known_axes(shape, num_blocks=10, num_heads=4) == axes
