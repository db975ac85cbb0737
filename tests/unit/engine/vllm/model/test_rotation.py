"""vLLM's rotation kernel for CPUs is wrong for some models, which use PyTorch's operation
instead.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pdmesh.engine.vllm.model.rotation import rotate_rightly, rotation_text

CONVOLUTIONS = SimpleNamespace(layer_types=["conv", "full_attention"])


def config(  # the Any stands for vLLM's VllmConfig
    *operations: str, facts: object = None, use_mla: bool = False, device: str = "cpu"
) -> Any:
    return SimpleNamespace(
        compilation_config=SimpleNamespace(custom_ops=list(operations)),
        device_config=SimpleNamespace(device_type=device),
        model_config=SimpleNamespace(hf_text_config=facts or SimpleNamespace(), use_mla=use_mla),
    )


LATENT = SimpleNamespace(kv_lora_rank=512)


@pytest.mark.parametrize(
    "made",
    [config("all", facts=CONVOLUTIONS), config("all", use_mla=True), config("all", facts=LATENT)],
    ids=["short-convolution", "latent-attention", "latent-attention-off"],
)
def test_a_model_that_hands_over_heads_apart_uses_pytorch_s_operation(made: Any) -> None:
    rotate_rightly(made)
    assert made.compilation_config.custom_ops == ["all", "-rotary_embedding"]


@pytest.mark.parametrize(
    "made",
    [
        config("all"),
        config("all", facts=SimpleNamespace(layer_types=["mamba", "attention"])),
        config("all", facts=CONVOLUTIONS, device="cuda"),
        config("all", "+rotary_embedding", facts=CONVOLUTIONS),
        config("none", "-rotary_embedding", facts=CONVOLUTIONS),
    ],
    ids=["usual", "state-space", "on-a-gpu", "asked-for", "told-not-to"],
)
def test_other_models_and_what_engine_args_choose_stay(made: Any) -> None:
    before = list(made.compilation_config.custom_ops)
    rotate_rightly(made)
    assert made.compilation_config.custom_ops == before


def test_kv_of_the_kernel_and_of_pytorch_have_other_fingerprints_where_they_differ() -> None:
    kernel = rotation_text(config("all", "+rotary_embedding", facts=CONVOLUTIONS))
    right = rotation_text(config("all", "-rotary_embedding", facts=CONVOLUTIONS))
    assert kernel != right
    assert kernel
    assert right
    assert rotation_text(config("all")) == []  # the fingerprints of other models stay as they were
    assert rotation_text(config("all", facts=CONVOLUTIONS, device="cuda")) == []


@pytest.mark.vllm
def test_vllm_s_kernel_for_cpus_still_turns_heads_apart_wrongly() -> None:
    """If this test fails, vLLM has mended its kernel, and `rotation.py` can be removed."""
    torch = pytest.importorskip("torch")
    ops = pytest.importorskip("vllm._custom_ops")
    num_tokens, heads, size = 8, 4, 32
    angles = torch.outer(torch.arange(64.0), 1e6 ** -(torch.arange(0, size, 2) / size))
    cache = torch.cat((angles.cos(), angles.sin()), -1)
    positions = torch.arange(5, 5 + num_tokens)
    generator = torch.Generator().manual_seed(0)
    given = torch.randn(num_tokens, heads, size, generator=generator)
    flat, apart = given.reshape(num_tokens, -1).clone(), given.clone()
    for query in (flat, apart):
        ops.rotary_embedding(positions, query, query.clone(), size, cache, True)
    right = flat.reshape(given.shape)
    # the kernel turns only the tokens whose rows are among the first `num_tokens` rows
    num_turned = num_tokens // heads
    assert (apart - right).abs().max() > 0.1
    assert torch.equal(apart[num_turned:], given[num_turned:])
    assert not torch.equal(right[num_turned:], given[num_turned:])
