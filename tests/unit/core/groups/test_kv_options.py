"""Options with which prefills and decodes cannot exchange KV are found before the instances
start.
"""

from __future__ import annotations

import json

import pytest

from pdmesh.core.groups.kv_options import OptionText, kv_identity, kv_split

DRAFT = json.dumps({"method": "draft_model", "model": "/models/small", "k": "4"})
HEAD = json.dumps({"method": "eagle", "model": "/models/small"})
LOOKUP = json.dumps({"method": "prompt_lookup", "k": "4"})


def split(prefill: str, decode: str) -> str:
    return kv_split("speculation", OptionText("P", prefill), OptionText("D", decode))


@pytest.mark.req("S67")
@pytest.mark.parametrize("without", ["", LOOKUP, '{"method": "none"}'])
def test_a_draft_at_one_role_only_is_a_split_that_names_both_settings(without: str) -> None:
    line = split(without, DRAFT)
    assert line.startswith(
        "the draft of prefills is none (P), and that of decodes is draft_model /models/small (D): "
    )
    assert "\n" not in line
    assert split(DRAFT, without)


@pytest.mark.req("S67")
def test_another_draft_or_method_is_a_split() -> None:
    assert split(DRAFT, DRAFT.replace("small", "other"))
    assert split(DRAFT, HEAD)
    assert split('{"method": "mtp"}', "")


@pytest.mark.req("S67")
def test_what_does_not_change_kv_may_differ() -> None:
    assert split(DRAFT, DRAFT.replace('"4"', '"2"').replace("small", "small/")) == ""
    assert split("", LOOKUP) == ""


@pytest.mark.parametrize("text", ["{", "[]", "4", '{"method": ["eagle"]}', "[" * 100_000])
def test_an_option_that_no_instance_takes_is_left_to_the_instance(text: str) -> None:
    assert split(text, "") == ""


def test_arguments_of_vllm_that_change_kv_must_be_equal() -> None:
    def split_args(prefill: str, decode: str) -> str:
        return kv_split("engine_args", OptionText("P", prefill), OptionText("D", decode))

    awq = '{"quantization": "awq"}'
    assert split_args(awq, "") == (
        'what changes KV in engine_args of prefills is {"quantization":"awq"} (P), and that of '
        "decodes is none (D): they exchange no KV; give both the same"
    )
    assert split_args(awq, '{"enforce_eager": "true", "quantization": "awq"}') == ""


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
