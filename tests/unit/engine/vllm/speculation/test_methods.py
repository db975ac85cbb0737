"""Speculation methods that would not work are refused in one line before vLLM starts."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from pdmesh.core.speculation.proposal_length import NO_SPECULATION, Method, Speculation
from pdmesh.engine.vllm.config import VllmConfig
from pdmesh.engine.vllm.engine import VllmEngine
from pdmesh.engine.vllm.speculation.methods import check_speculation, speculative_config
from pdmesh.errors import EngineFailed

LOOKUP = Speculation(4, 0.6, 0.01)


def refused(speculation: Speculation) -> EngineFailed:
    with pytest.raises(EngineFailed) as caught:
        check_speculation(speculation)
    assert "\n" not in caught.value.message
    assert caught.value.message.startswith(f"{caught.value.field}: ")
    return caught.value


def test_prompt_lookup_and_none_are_possible() -> None:
    check_speculation(LOOKUP)
    check_speculation(NO_SPECULATION)
    check_speculation(replace(LOOKUP, is_fixed=True))


@pytest.mark.req("S114")
def test_layers_of_the_model_itself_have_no_folder() -> None:
    layers = replace(LOOKUP, method=Method.MTP, is_fixed=True)
    check_speculation(layers)
    assert speculative_config(layers, 8) == {"method": "mtp", "num_speculative_tokens": 4}


@pytest.mark.req("S67", "S113", "S115")
@pytest.mark.parametrize("method", [Method.DRAFT_MODEL, Method.EAGLE])
def test_a_draft_or_a_head_is_named_by_its_folder(method: Method) -> None:
    draft = replace(LOOKUP, method=method, model="/models/small", is_fixed=True)
    check_speculation(draft)
    assert speculative_config(draft, 8) == {
        "method": method.value,
        "model": "/models/small",
        "num_speculative_tokens": 4,
    }


@pytest.mark.req("S113")
def test_a_draft_that_is_not_there_ends_the_start_at_once(tmp_path: Path) -> None:
    """As for the model itself, the draft's folder is read before vLLM is imported."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    draft = replace(LOOKUP, method=Method.DRAFT_MODEL, model=str(tmp_path / "nothing"))
    config = VllmConfig("decode-0", 1, tmp_path, "m", speculation=draft)
    with pytest.raises(EngineFailed, match="nothing") as failed:
        asyncio.run(VllmEngine(config).start())
    assert failed.value.reason == "MODEL_MISSING"
    assert "`model` of the option `speculation`" in failed.value.message
    assert "--model" not in failed.value.message


@pytest.mark.skipif(find_spec("arctic_inference") is not None, reason="the package is there")
def test_suffix_decoding_names_the_package_that_is_missing() -> None:
    assert "arctic-inference" in refused(replace(LOOKUP, method=Method.SUFFIX)).message


def test_suffix_decoding_needs_a_fixed_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's proposer takes the number of tokens from its configuration, which is fixed."""
    monkeypatch.setattr("pdmesh.engine.vllm.speculation.methods.find_spec", lambda _: object())
    suffix = replace(LOOKUP, method=Method.SUFFIX)
    assert refused(suffix).field == "speculation.schedule"
    fixed = replace(suffix, is_fixed=True)
    check_speculation(fixed)
    assert speculative_config(fixed, 8) == {"method": "suffix", "num_speculative_tokens": 4}


def test_an_engine_with_such_a_method_ends_its_start_at_once(tmp_path: Path) -> None:
    suffix = replace(LOOKUP, method=Method.SUFFIX)
    config = VllmConfig("decode-0", 1, tmp_path, "m", speculation=suffix)
    with pytest.raises(EngineFailed, match=r"speculation\.(method|schedule): "):
        asyncio.run(VllmEngine(config).start())


def test_a_fixed_schedule_has_no_table() -> None:
    assert "num_speculative_tokens_per_batch_size" in speculative_config(LOOKUP, 8)
    told = speculative_config(replace(LOOKUP, is_fixed=True), 8)
    assert "num_speculative_tokens_per_batch_size" not in told
    assert told["num_speculative_tokens"] == 4
