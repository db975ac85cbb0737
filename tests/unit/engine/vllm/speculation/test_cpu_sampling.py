"""On a CPU, each checked token is drawn with its own request's temperature, top_k and top_p."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from pdmesh.engine.vllm.speculation.cpu_sampling import (  # noqa: E402 - it needs torch
    expanded,
    mend_drawing_on_cpu,
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
    mend_drawing_on_cpu()
    mend_drawing_on_cpu()
    asked = SimpleNamespace(
        all_greedy=False, temperature=torch.tensor([0.5]), top_k=torch.tensor([2]), top_p=None
    )
    logits = torch.tensor([[1.0, 2.0, 3.0]] * num_checked).reshape(num_checked, 3)
    got = sampler.apply_sampling_constraints(logits, torch.tensor([num_checked]), asked)
    assert got.tolist() == [[-float("inf"), 4.0, 6.0]] * num_checked


@pytest.mark.req("S111", "S118")
@pytest.mark.filterwarnings("default")  # vLLM's own
def test_random_numbers_are_made_only_for_rows_with_proposed_tokens() -> None:
    sampler = pytest.importorskip("vllm.v1.sample.rejection_sampler")
    mend_drawing_on_cpu()
    vllms = sampler.sample_recovered_tokens.__wrapped__

    before = torch.get_rng_state()
    assert len(recovered(sampler.sample_recovered_tokens, [0, 0])) == 0
    assert torch.equal(torch.get_rng_state(), before)
    assert len(recovered(vllms, [0, 0])) == 0
    assert not torch.equal(torch.get_rng_state(), before)


@pytest.mark.req("S111")
@pytest.mark.filterwarnings("default")  # vLLM's own
@pytest.mark.parametrize("counts", [[2, 0, 1, 0], [0, 3, 0, 1], [1, 1, 1, 1], [0, 0, 0, 4]])
def test_seeded_rows_recover_the_tokens_that_vllm_gives_them(counts: list[int]) -> None:
    sampler = pytest.importorskip("vllm.v1.sample.rejection_sampler")
    mend_drawing_on_cpu()
    vllms = sampler.sample_recovered_tokens.__wrapped__
    assert recovered(sampler.sample_recovered_tokens, counts) == recovered(vllms, counts)
    assert recovered(vllms, counts) != recovered(vllms, counts, first_seed=100)  # seeds matter


@dataclass
class Seeds:
    """All that is read of vLLM's `SamplingMetadata`."""

    generators: dict[int, torch.Generator]


def recovered(
    recover: Callable[..., torch.Tensor], counts: list[int], first_seed: int = 0
) -> list[int]:
    """The tokens for rows that propose `counts` tokens each, every row with a seed of its own."""
    num_tokens, vocab_size = sum(counts), 5000
    probs = torch.rand((num_tokens, vocab_size), generator=torch.Generator().manual_seed(7))
    seeds = {row: torch.Generator().manual_seed(first_seed + row) for row in range(len(counts))}
    found = recover(
        max(counts),
        counts,
        torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32),
        torch.arange(num_tokens, dtype=torch.int32),
        None,
        probs.softmax(dim=-1),
        Seeds(seeds),
        torch.device("cpu"),
        False,
    )
    return [int(token) for token in found]
