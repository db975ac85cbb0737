"""Models whose layers keep a state beside others with attention, through prefill and decode.

Plain vLLM runs as it would alone, one request at a time, and so does the pair: each step then
computes the same tokens, so that even bfloat16 gives equal numbers.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import pytest_asyncio

from pdmesh.engine.base import Sampling
from pdmesh.engine.vllm.config import VllmConfig
from pdmesh.errors import EngineMisconfigured
from pdmesh.kv.tiers.config import TierConfig
from tests.e2e.caches.tiny_stateful import (
    NUM_LAYERS,
    NUM_STATES,
    write_tiny_granite,
    write_tiny_lfm2,
    write_tiny_qwen3_next,
)
from tests.e2e.cases import VOCABULARY, Case, differences, generate_all
from tests.e2e.conftest import ASYNC_SCHEDULING, Plain, plain_vllm
from tests.e2e.pair import Host, Pair, running

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),  # vLLM's own
    pytest.mark.asyncio(loop_scope="module"),
]


@dataclass(frozen=True, slots=True)
class Kind:
    write: Callable[[Path], Path]
    block_size: int
    dtype: str = "float32"
    num_step_blocks: int = 4  # that a step computes at most


KINDS = {
    "short-convolution": Kind(write_tiny_lfm2, 32),
    "delta-rule": Kind(write_tiny_qwen3_next, 128, "bfloat16", 2),
    # vLLM 0.32 fails on a CPU where a step of Mamba-2 passes a block's end.
    "mamba-2": Kind(write_tiny_granite, 32, num_step_blocks=1),
}


def stateful_cases(block_size: int, seed: int = 6) -> list[Case]:
    """Prompts of lengths around blocks' ends, shared prefixes, and an answer over several blocks.

    A state is valid after exactly as many tokens as it has seen, so each of these lengths counts.
    """
    rng, size = random.Random(seed), block_size
    edges = [1, 2, *(k * size + d for k in (1, 2, 4) for d in (-1, 0, 1)), 5 * size + size // 2]
    shared = tuple(rng.choices(VOCABULARY, k=3 * size))
    cases = [Case(tuple(rng.choices(VOCABULARY, k=n)), rng.choice((3, 5, 8))) for n in edges]
    prefixes = [shared[:length] for length in (size, 2 * size - 1, 2 * size, 3 * size)]
    cases += [Case((*each, *rng.choices(VOCABULARY, k=size // 2)), 5) for each in prefixes]
    lengths, answer = (size // 2, 2 * size), size + size // 2
    return cases + [Case(tuple(rng.choices(VOCABULARY, k=n)), answer) for n in lengths]


@dataclass(frozen=True, slots=True)
class Served:
    """A pair on one model, and what plain vLLM draws with it."""

    kind: Kind
    model_dir: Path
    plain: Plain
    prefill: Host
    decode: Host

    def decided(self) -> tuple[list[Case], list[list[int]]]:
        return self.plain.decided(stateful_cases(self.kind.block_size))


def config(kind: Kind, model_dir: Path, instance_id: str, incarnation: int) -> VllmConfig:
    return VllmConfig(
        instance_id,
        incarnation,
        model_dir,
        "tiny",
        dtype=kind.dtype,
        block_size=kind.block_size,
        kv_cache_bytes=64 << 20,
        staging_bytes=32 << 20,
        landing_bytes=32 << 20,
        max_model_len=8 * kind.block_size,
        max_num_seqs=8,
        max_num_batched_tokens=kind.num_step_blocks * kind.block_size,
        async_scheduling=ASYNC_SCHEDULING,
    )


@pytest.fixture(
    scope="module",
    params=[
        "short-convolution",
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("delta-rule", "mamba-2")),
    ],
)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture(scope="module")
def model_dir(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kind.write(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def plain(kind: Kind, model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plain]:
    with plain_vllm(
        model_dir,
        stateful_cases(kind.block_size),
        tmp_path_factory.mktemp("plain"),
        dtype=kind.dtype,
        block_size=kind.block_size,
        max_model_len=8 * kind.block_size,
        max_num_seqs=1,
        max_num_batched_tokens=kind.num_step_blocks * kind.block_size,
        kv_cache_memory_bytes=64 << 20,
    ) as plain:
        yield plain


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(kind: Kind, model_dir: Path, plain: Plain) -> AsyncIterator[Served]:
    async with (
        running(config(kind, model_dir, "prefill", 1)) as prefill,
        running(config(kind, model_dir, "decode", 2)) as decode,
    ):
        yield Served(kind, model_dir, plain, prefill, decode)


async def idle(*hosts: Host) -> None:
    for host in hosts:
        await host.until_idle()


@pytest.mark.req("S1", "S3")
async def test_a_prompts_state_handed_over_gives_the_outputs_of_plain_vllm(served: Served) -> None:
    todo, expected = served.decided()
    assert max(map(len, expected)) > served.kind.block_size, "an answer fills a block of states"
    run = Pair(served.prefill, served.decode, salt="whole")
    for _ in range(2):  # the second time, both sides find prefixes in their caches
        assert differences(expected, await generate_all(run.generate, todo, 1)) == []
    assert run.num_computed_at_decode == 0
    assert run.num_handed_over > len(todo) // 2
    await idle(served.prefill, served.decode)


@pytest.mark.req("S48")
async def test_a_state_handed_over_per_layer_gives_the_outputs_of_plain_vllm(
    served: Served,
) -> None:
    todo, expected = served.decided()
    run = Pair(served.prefill, served.decode, salt="per-layer")
    for _ in range(2):
        assert differences(expected, await generate_all(run.generate_per_layer, todo, 1)) == []
    assert run.num_computed_at_decode == 0
    assert run.num_handed_over > len(todo) // 2
    await idle(served.prefill, served.decode)


@pytest.mark.req("S3", "S47")
async def test_of_a_layer_with_a_state_one_block_moves(served: Served) -> None:
    size = served.kind.block_size
    length = 4 * size + 3
    prompt = random.Random(17).choices(VOCABULARY, k=length)
    run = Pair(served.prefill, served.decode, salt="bytes")
    await run.generate(prompt, Sampling(max_tokens=3))
    assert run.last_received is not None
    token_bytes = served.decode.info.kv_bytes_per_token
    layer_bytes = token_bytes * size // NUM_LAYERS
    assert run.last_received.kv_bytes == layer_bytes * (
        (NUM_LAYERS - NUM_STATES) * -(-length // size) + NUM_STATES
    )
    await idle(served.prefill, served.decode)


async def test_an_answer_goes_on_elsewhere_but_for_roundings(served: Served) -> None:
    """A request that moves brings the tokens that it has drawn, and is prefilled with them.

    vLLM's kernels for a prompt and for a token round differently: 2 of 18 answers of LFM2 change,
    one of them at the prefill, before anything is handed over. Spoilt states change most answers.
    """
    if served.kind.dtype != "float32":
        pytest.skip("in bfloat16, the two kernels draw other tokens too often")
    todo, expected = served.decided()
    run = Pair(served.prefill, served.decode, salt="moves")

    async def moved(prompt: Sequence[int], sampling: Sampling) -> list[int]:
        first = (sampling.max_tokens + 1) // 2
        drawn = await run.generate(prompt, replace(sampling, max_tokens=first))
        rest = replace(sampling, max_tokens=sampling.max_tokens - first)
        return [*drawn, *(await run.generate([*prompt, *drawn], rest) if rest.max_tokens else ())]

    got = await generate_all(moved, todo, 1)
    assert len(differences(expected, got)) <= len(todo) // 6
    await idle(served.prefill, served.decode)


@pytest.mark.req("S77")
async def test_the_comparison_fails_when_only_the_states_are_zeroed(served: Served) -> None:
    todo, expected = served.decided()
    picked = [i for i, tokens in enumerate(expected) if len(tokens) >= 3]
    broken = replace(
        config(served.kind, served.model_dir, "broken", 3),
        failpoints="decode.pulled=zero-states",
    )
    async with running(broken) as decode:
        run = Pair(served.prefill, decode, salt="broken")
        got = await generate_all(run.generate, [todo[i] for i in picked], 1)
    assert len(differences([expected[i] for i in picked], got)) > len(picked) // 2
    await idle(served.prefill)


async def test_states_with_tiers_are_refused_in_one_line(kind: Kind, model_dir: Path) -> None:
    pooled = replace(
        config(kind, model_dir, "refuses", 4), tiers=TierConfig(host_pool_bytes=64 << 20)
    )
    with pytest.raises(EngineMisconfigured, match="tiers keep no states") as caught:
        async with running(pooled):
            pytest.fail("it started")
    assert caught.value.reason == "MODEL_UNSUPPORTED"
    assert "\n" not in caught.value.message
