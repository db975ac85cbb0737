"""On a CPU, each checked token is drawn with its own request's temperature, top_k and top_p."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from pdmesh.engine.vllm.speculation.cpu_sampling import (  # noqa: E402 - it needs torch
    expand_on_cpu,
    expanded,
)


@pytest.mark.req("S111")
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64"])
def test_a_value_is_there_once_for_each_token_of_its_request(dtype: str) -> None:
    """vLLM's own kernel returns what was in memory for all but int64."""
    values = torch.tensor([3, 4, 5], dtype=getattr(torch, dtype))
    got = expanded(values, torch.tensor([2, 2, 5], dtype=torch.int32), 5)
    assert got.dtype == values.dtype
    assert got.tolist() == [3, 3, 5, 5, 5]


@pytest.mark.req("S111")
def test_fractions_stay_and_the_greedy_temperature_becomes_one() -> None:
    temperatures = torch.tensor([0.0, 0.5, 1.5])
    got = expanded(temperatures, torch.tensor([1, 3, 4]), 4, replace_from=0, replace_to=1)
    assert got.tolist() == [1.0, 0.5, 0.5, 1.5]


@pytest.mark.req("S111")
@pytest.mark.filterwarnings("default")  # vLLM's own
@pytest.mark.parametrize("num_checked", [0, 3])
def test_logits_are_constrained_in_steps_that_check_tokens_and_in_others(num_checked: int) -> None:
    """Through vLLM's own function, with a top_k, which ended the engine."""
    sampler = pytest.importorskip("vllm.v1.sample.rejection_sampler")
    expand_on_cpu()
    expand_on_cpu()
    asked = SimpleNamespace(
        all_greedy=False, temperature=torch.tensor([0.5]), top_k=torch.tensor([2]), top_p=None
    )
    logits = torch.tensor([[1.0, 2.0, 3.0]] * num_checked).reshape(num_checked, 3)
    got = sampler.apply_sampling_constraints(logits, torch.tensor([num_checked]), asked)
    assert got.tolist() == [[-float("inf"), 4.0, 6.0]] * num_checked
