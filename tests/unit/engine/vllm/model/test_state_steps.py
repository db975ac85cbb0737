"""Mamba-2 on a CPU computes only one block in a step. Longer steps are refused at the start."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pdmesh.engine.vllm.model.state_steps import check_state_steps
from pdmesh.errors import EngineMisconfigured

GRANITE = {"mamba_chunk_size": 256}
NEMOTRON = {"chunk_size": 256}


def config(  # the Any stands for vLLM's VllmConfig
    step_tokens: int,
    facts: dict[str, int],
    *,
    has_inner_state: bool = True,
    num_slots: int = 8,
    device: str = "cpu",
) -> Any:
    return SimpleNamespace(
        cache_config=SimpleNamespace(block_size=256),
        scheduler_config=SimpleNamespace(
            max_num_batched_tokens=step_tokens, max_num_seqs=num_slots
        ),
        device_config=SimpleNamespace(device_type=device),
        model_config=SimpleNamespace(
            served_model_name="m",
            has_inner_state=has_inner_state,
            hf_text_config=SimpleNamespace(**facts),
        ),
    )


@pytest.mark.parametrize("facts", [GRANITE, NEMOTRON])
def test_a_step_longer_than_a_block_is_refused_in_a_line_that_names_the_size(
    facts: dict[str, int],
) -> None:
    with pytest.raises(EngineMisconfigured, match="set max_num_batched_tokens to 256") as caught:
        check_state_steps(config(257, facts))
    assert caught.value.field == "max_num_batched_tokens"
    assert "\n" not in str(caught.value)


def test_if_the_slots_alone_make_the_step_too_long_the_line_names_them() -> None:
    with pytest.raises(EngineMisconfigured, match="set num_slots to 256 at most") as caught:
        check_state_steps(config(512, GRANITE, num_slots=512))
    assert caught.value.field == "num_slots"


@pytest.mark.parametrize(
    "made",
    [
        config(256, GRANITE),
        config(2048, GRANITE, device="cuda"),
        config(2048, {}),
        config(2048, NEMOTRON, has_inner_state=False),
    ],
    ids=["one-block", "on-a-gpu", "other-states", "no-states"],
)
def test_other_steps_may_be_as_long_as_asked(made: Any) -> None:
    check_state_steps(made)
