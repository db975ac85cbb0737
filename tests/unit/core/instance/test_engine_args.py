"""What an operator may tell vLLM himself, and what of it two instances must agree on."""

from __future__ import annotations

import pytest

from pdmesh.core.instance.engine_args import kv_identity, refusal


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


def test_arguments_that_change_only_speed_leave_kv_exchangeable() -> None:
    assert kv_identity({"gpu_memory_utilization": 0.5, "enforce_eager": True}) == ""
    assert kv_identity({}) == ""


def test_the_identity_does_not_depend_on_the_order_and_holds_what_may_change_kv() -> None:
    one = kv_identity({"quantization": "fp8", "hf_overrides": {"b": 1, "a": 2}, "log_level": "x"})
    other = kv_identity({"hf_overrides": {"a": 2, "b": 1}, "quantization": "fp8"})
    assert one == other
    assert one != kv_identity({"quantization": "awq", "hf_overrides": {"b": 1, "a": 2}})


def test_a_number_and_its_text_are_one_value() -> None:
    assert kv_identity({"hf_overrides": '{"a": 2}'}) == kv_identity({"hf_overrides": {"a": 2}})
    assert kv_identity({"x": "1"}) == kv_identity({"x": 1}) != kv_identity({"x": "awq"})


def test_an_unknown_argument_counts() -> None:
    assert kv_identity({"from_a_later_vllm": 1}) != ""
