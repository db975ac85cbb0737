"""On a CPU, each checked token is drawn with the temperature, top_k and top_p of its request."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from pdmesh.engine.vllm.speculation.cpu_sampling import (  # noqa: E402 - it needs torch
    expanded,
    mend_drawing_on_cpu,
    only_if_proposed,
    only_where_proposed,
)


@pytest.mark.req("S111")
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64"])
def test_a_value_is_there_once_for_each_token_of_its_request(dtype: str) -> None:
    """Except for int64, vLLM's own kernel does not write the result, which keeps the old bytes of
    the memory.
    """
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
@pytest.mark.filterwarnings("default")  # vLLM itself raises these warnings
def test_logits_of_checked_tokens_are_constrained_as_their_request_asks() -> None:
    """vLLM's own function is called with a top_k. Without our patch, that ended the engine."""
    sampler = pytest.importorskip("vllm.v1.sample.rejection_sampler")
    mend_drawing_on_cpu()
    mend_drawing_on_cpu()
    asked = SimpleNamespace(
        all_greedy=False, temperature=torch.tensor([0.5]), top_k=torch.tensor([2]), top_p=None
    )
    logits = torch.tensor([[1.0, 2.0, 3.0]] * 3)
    got = sampler.apply_sampling_constraints(logits, torch.tensor([3]), asked)
    assert got.tolist() == [[-float("inf"), 4.0, 6.0]] * 3


@pytest.mark.req("S118")
@pytest.mark.parametrize("num_proposed", [0, 3])
def test_a_step_without_proposals_only_draws(num_proposed: int) -> None:
    calls: list[tuple[str, object]] = []

    def plain(**given: object) -> str:
        calls.append(("drawn", given))
        return "drawn"

    def check(sampler: object, *given: object) -> str:
        calls.append(("checked", given))
        return "checked"

    metadata = SimpleNamespace(max_spec_len=num_proposed)
    step = only_if_proposed(check)
    got = step(SimpleNamespace(sampler=plain), metadata, None, "logits", "asked")
    if num_proposed:
        assert calls == [("checked", (metadata, None, "logits", "asked"))]
    else:
        given = {"logits": "logits", "sampling_metadata": "asked", "predict_bonus_token": True}
        assert calls == [("drawn", given)]
    assert got == calls[0][0]


@pytest.mark.req("S111", "S118")
@pytest.mark.parametrize("counts", [[2, 0, 1, 0], [0, 3, 0, 1], [1, 1, 1], [0, 0, 0, 4]])
def test_rows_without_proposals_get_no_random_numbers(counts: list[int]) -> None:
    """Leaving these rows out does not change the tokens that replace refused proposals."""
    asked = Asked(counts)
    assert recover_one_by_one(*asked.arguments()) == asked.expected()
    assert only_where_proposed(recover_one_by_one)(*asked.arguments()) == asked.expected()
    assert asked.num_rows == [len(counts), sum(count > 0 for count in counts)]


@dataclass
class Seeds:
    """The part of vLLM's `SamplingMetadata` that is read.

    A string such as "seed 3" stands for the generator of row 3.
    """

    generators: dict[int, str]


class Asked:
    """Rows that propose `counts` tokens each. All rows but row 1 have a seed."""

    def __init__(self, counts: list[int]) -> None:
        self.counts = counts
        self.num_rows: list[int] = []  # the number of rows that got random numbers, for each call

    def arguments(self) -> tuple[Any, ...]:
        ends = torch.tensor(self.counts).cumsum(0)
        tokens = torch.arange(100, 100 + sum(self.counts))
        seeds = Seeds({row: f"seed {row}" for row in range(len(self.counts)) if row != 1})
        return max(self.counts), self.counts, ends, tokens, None, None, seeds, self.num_rows

    def expected(self) -> list[tuple[int, str]]:
        rows = [row for row, count in enumerate(self.counts) for _ in range(count)]
        return [(100 + at, f"seed {row}" if row != 1 else "") for at, row in enumerate(rows)]


def recover_one_by_one(
    max_spec_len: int,
    counts: list[int],
    ends: Any,  # `ends` and `tokens` are tensors
    tokens: Any,
    draft_probs: None,
    target_probs: None,
    seeds: Seeds,
    num_rows: list[int],
) -> list[tuple[int, str]]:
    """Pair each proposed token with the generator of its row, in the order of vLLM's kernel."""
    found = []
    for row, end in enumerate(ends.tolist()):
        begin = int(ends[row - 1]) if row else 0
        assert end - begin == counts[row] <= max_spec_len
        mine = tokens[begin:end].tolist()
        found += [(token, seeds.generators.get(row, "")) for token in mine]
    num_rows.append(len(counts))
    return found
