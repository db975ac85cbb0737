"""The random numbers for a token depend on its position, whichever engine drew the earlier
tokens.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from pdmesh.engine.base import Sampling
from pdmesh.engine.vllm.connector.worker.draws.seeded_draws import SeededDraws, put_generators
from pdmesh.engine.vllm.host.sampling import honoured

VOCABULARY = 997
SEED, NUM_TOKENS = 42, 40


def word(generator: Any) -> int:
    """Draw as vLLM's sampler for CPUs does."""
    drawn = torch.randint(0, 2**31, (1,), generator=generator, dtype=torch.long)
    return int(drawn.item())


def row(generator: Any) -> list[float]:
    """Draw as vLLM's sampler for other devices does."""
    return list(torch.empty(VOCABULARY).exponential_(generator=generator).tolist())


def uninterrupted(draw: Any) -> list[Any]:
    """The draws of plain vLLM, which makes the generator once and never changes its position."""
    generator = torch.Generator(device="cpu")
    generator.manual_seed(SEED)
    return [draw(generator) for _ in range(NUM_TOKENS)]


class Runner:
    """Stands in for vLLM's model runner, with one seeded request in its batch."""

    def __init__(self, num_drawn: int = 0, *, forward: str = "forward_cpu") -> None:
        def sample() -> None: ...

        sample.__name__ = forward
        self.sampler = SimpleNamespace(
            topk_topp_sampler=SimpleNamespace(forward=sample, use_fp64_gumbel=False)
        )
        params = SimpleNamespace(seed=SEED)
        made = torch.Generator(device="cpu")
        made.manual_seed(SEED)
        self.state = SimpleNamespace(
            sampling_params=params, generator=made, output_token_ids=[7] * num_drawn
        )
        self.requests = {"other": None, "r": self.state}
        self.input_batch = SimpleNamespace(generators={1: made}, req_ids=["other", "r"])
        self.speculative_config: object = None

    def step(self, draw: Any, *, is_discarded: bool = False, num_proposed: int = 0) -> Any:
        put_generators(self, torch.zeros(2, VOCABULARY), (3, num_proposed))
        generator = self.input_batch.generators[1]
        drawn = draw(generator)
        if is_discarded:
            generator.set_offset(generator.get_offset() - 4)  # as vLLM does on every device
        else:
            self.state.output_token_ids.append(7)
        return drawn


@pytest.mark.req("S37")
@pytest.mark.parametrize(("forward", "draw"), [("forward_cpu", word), ("forward_native", row)])
def test_a_request_that_migrates_at_any_token_draws_the_tokens_of_one_engine(
    forward: str, draw: Any
) -> None:
    expected = uninterrupted(draw)
    for num_drawn in range(NUM_TOKENS):
        runner = Runner(num_drawn, forward=forward)
        got = [runner.step(draw) for _ in range(NUM_TOKENS - num_drawn)]
        assert got == expected[num_drawn:], num_drawn


def test_a_draw_that_is_discarded_is_drawn_again() -> None:
    """vLLM discards draws while it computes a prompt in chunks beside decodes of other requests."""
    expected, runner = uninterrupted(word), Runner()
    for _ in range(3):
        assert runner.step(word, is_discarded=True) == expected[0]
    assert [runner.step(word) for _ in range(5)] == expected[:5]


def test_tokens_that_vllm_drops_are_drawn_again() -> None:
    """If KV fails to load, vLLM drops the tokens that depend on it."""
    expected, runner = uninterrupted(word), Runner(num_drawn=3)
    assert [runner.step(word) for _ in range(6)] == expected[3:9]
    del runner.state.output_token_ids[3 + 2 :]
    assert runner.step(word) == expected[5]


def test_a_request_keeps_its_generator_when_it_leaves_the_batch_and_comes_back() -> None:
    runner = Runner()
    runner.step(word)
    assert isinstance(runner.state.generator, SeededDraws)
    assert runner.input_batch.generators[1] is runner.state.generator


@pytest.mark.req("S37", "S111")
def test_with_speculation_a_draw_that_is_discarded_is_drawn_again() -> None:
    """A chunk of a prompt has no proposal. So token 1 does not depend on the number of chunks."""
    expected, runner = uninterrupted(word), Runner()
    runner.speculative_config = object()
    for _ in range(3):
        assert runner.step(word, is_discarded=True) == expected[0]
    assert runner.step(word) == expected[0]


@pytest.mark.req("S111")
def test_no_noise_is_drawn_twice_once_a_proposal_was_checked() -> None:
    """The check of a proposal uses another amount of random numbers. It also draws several tokens
    in one step.
    """
    expected, runner = uninterrupted(word), Runner(num_drawn=5)
    runner.speculative_config = object()
    assert runner.step(word) == expected[5]
    assert runner.step(word, num_proposed=2) == expected[6], "the check itself is by position"
    runner.state.output_token_ids += [7, 7]  # two proposed tokens are accepted
    assert runner.step(word) == expected[7]
    assert runner.step(word, num_proposed=1) == expected[8]


def test_every_seed_is_one_that_vllm_honours() -> None:
    vllm = pytest.importorskip("vllm")
    from pdmesh.engine.vllm.host.sampling import sampling_params

    assert vllm.SamplingParams(seed=-1).seed is None, (
        "vLLM ignores this seed, so another one stands in"
    )
    seeds = [-(1 << 63), -2, -1, 0, 1, (1 << 63) - 17]
    taken = [sampling_params(Sampling(3, 1.0, seed=seed), 3).seed for seed in seeds]
    assert [t for t, s in zip(taken, seeds, strict=True) if s != -1] == [
        s for s in seeds if s != -1
    ]
    assert None not in taken
    assert len(set(taken)) == len(seeds)
    assert honoured(None) is None
