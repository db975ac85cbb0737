"""Tests which of vLLM's arguments an operator may set."""

from __future__ import annotations

import pytest

from pdmesh.core.instance.engine_args import refusal


@pytest.mark.parametrize(
    "name",
    [
        "gpu_memory_utilization", "enforce_eager", "quantization", "load_format", "tokenizer_mode",
        "trust_remote_code", "hf_overrides", "attention_backend", "enable_expert_parallel",
    ],
)  # fmt: skip
def test_what_the_mesh_has_no_setting_for_may_be_set(name: str) -> None:
    assert refusal(name) is None


@pytest.mark.parametrize(
    ("name", "setting"),
    [("max_num_seqs", "num_slots"), ("speculative_config", "speculation"), ("dtype", "dtype")],
)
def test_an_argument_that_a_setting_decides_is_refused_with_the_name_of_the_setting(
    name: str, setting: str
) -> None:
    assert refusal(name) == f"the mesh sets it: use {setting} instead"


@pytest.mark.parametrize(
    "name",
    [
        "kv_transfer_config", "scheduler_cls", "seed", "data_parallel_size", "spec_method",
        "prefill_context_parallel_size", "enable_prefix_caching",
    ],
)  # fmt: skip
def test_what_the_mesh_depends_on_is_refused(name: str) -> None:
    assert refusal(name) is not None
