"""What vLLM stores, as the fingerprint names it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pdmesh.core.kv_format import UNSCALED
from pdmesh.engine.vllm.cache_layout import known_axes
from pdmesh.engine.vllm.kv_facts import BESIDE, KvFacts, kv_dtype, kv_facts, kv_scales


def vllm_config(stored: str, *scales: tuple[float, float]) -> Any:
    layers = {
        f"layer.{i}": SimpleNamespace(_k_scale_float=k, _v_scale_float=v)
        for i, (k, v) in enumerate(scales)
    }
    return SimpleNamespace(
        model_config=SimpleNamespace(dtype="torch.bfloat16", get_total_num_kv_heads=lambda: 8),
        cache_config=SimpleNamespace(cache_dtype=stored),
        compilation_config=SimpleNamespace(static_forward_context=layers),
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
def test_scales_that_lie_elsewhere_are_part_of_the_name() -> None:
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
    assert kv_facts(vllm_config("auto", (1.0, 1.0), (1.0, 1.0)), names) == KvFacts(
        "bfloat16", UNSCALED, 8
    )


@pytest.mark.req("S57")
@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((10, 4, 16, 256), "bhnc"),
        ((2, 10, 16, 4, 128), "kbnhc"),
        ((10, 2, 16, 4, 128), "bknhc"),
        ((20, 4, 8, 256), None),  # blocks split for a kernel
        ((10, 8, 16, 256), None),  # not the heads of this rank
        ((10, 16, 576), None),  # latent attention
    ],
)
def test_the_axes_of_a_gpu_cache_are_known_by_its_shape(
    shape: tuple[int, ...], axes: str | None
) -> None:
    assert known_axes(shape, num_blocks=10, num_heads=4) == axes
