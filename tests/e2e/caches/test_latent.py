"""A prefill and a decode draw the same tokens as plain vLLM, with latent attention (MLA).

Plain vLLM is vLLM without the mesh. On a CPU, vLLM's reference kernel computes the attention, even
on processors with AMX. With this kernel, vLLM caches no prefixes and computes a prompt in one step.
So every prompt moves whole, or comes from a tier.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import pytest
import pytest_asyncio

from pdmesh.engine.base import Sampling
from pdmesh.engine.vllm.config import VllmConfig, installed_device
from pdmesh.errors import EngineMisconfigured
from pdmesh.kv.tiers.config import TierConfig
from tests.e2e.caches.tiny_latent import LATENT, NUM_LAYERS, ROTATED, write_tiny_deepseek
from tests.e2e.caches.transformers_answers import num_unlike_transformers
from tests.e2e.cases import VOCABULARY, Case, differences, generate_all
from tests.e2e.conftest import ASYNC_SCHEDULING, NEAR_TIE, Plain, plain_vllm
from tests.e2e.pair import Host, Pair, running

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),  # vLLM emits warnings
    pytest.mark.asyncio(loop_scope="module"),
]
HAS_GPU: Final = installed_device() != "cpu"
BLOCK_SIZE: Final = 64 if HAS_GPU else 16  # the CPU kernel takes only blocks of 16
DTYPE: Final = "bfloat16" if HAS_GPU else "float32"
NUM_BYTES: Final = 2 if HAS_GPU else 4  # bytes of one number
MAX_MODEL_LEN: Final = 768
# In bfloat16, an answer may depend on its batch. So only one request runs at a time.
NUM_CONCURRENT: Final = 1 if HAS_GPU else 4
ENGINE_ARGS: Final[dict[str, Any]] = {} if HAS_GPU else {"attention_backend": "CPU_MLA"}
# a margin of log probabilities that rounding may reverse
NEAR: Final = 0.2 if HAS_GPU else NEAR_TIE
POOL: Final = TierConfig(host_pool_bytes=192 << 20, timeout_s=20.0)
SERVED_BY_POOL: Final = ("host", "served")
ROUNDS: Final = 2


def latent_cases(seed: int = 5) -> list[Case]:
    """Prompts whose lengths lie around blocks, shared prefixes, and answers over several blocks."""
    rng, size = random.Random(seed), BLOCK_SIZE
    edges = [1, *(k * size + d for k in (1, 2, 5) for d in (-1, 0, 1)), 100, 160, 250, 300]
    shared = tuple(rng.choices(VOCABULARY, k=5 * size))
    cases = [Case(tuple(rng.choices(VOCABULARY, k=n)), rng.choice((3, 5, 8))) for n in edges]
    prefixes = [shared[:length] for length in (size, 2 * size - 1, 5 * size)]
    cases += [Case((*each, *rng.choices(VOCABULARY, k=40)), 5) for each in prefixes]
    return cases + [Case(tuple(rng.choices(VOCABULARY, k=n)), 2 * size + 3) for n in (9, 90)]


@dataclass(frozen=True, slots=True)
class Served:
    """A pair on one model, and the tokens that plain vLLM draws with this model."""

    model_dir: Path
    plain: Plain
    prefill: Host
    decode: Host

    def decided(self) -> tuple[list[Case], list[list[int]]]:
        return clear(self.plain)


def clear(plain: Plain) -> tuple[list[Case], list[list[int]]]:
    """The cases and answers, each cut at its first near-tie.

    A near-tie is a step in which two tokens are almost equally likely. Cases that begin with a
    near-tie are left out.
    """
    both = zip(*plain.cut(latent_cases(), NEAR), strict=True)
    kept = [(case, answer) for case, answer in both if answer]
    assert len(kept) > len(latent_cases()) // 2
    return [case for case, _ in kept], [answer for _, answer in kept]


def config(model_dir: Path, instance_id: str, incarnation: int, **more: Any) -> VllmConfig:
    return VllmConfig(
        instance_id,
        incarnation,
        model_dir,
        "tiny",
        dtype=DTYPE,
        block_size=BLOCK_SIZE,
        kv_cache_bytes=64 << 20,
        staging_bytes=32 << 20,
        landing_bytes=32 << 20,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=8,
        async_scheduling=ASYNC_SCHEDULING,
        engine_args=ENGINE_ARGS,
        **more,
    )


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_deepseek(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def plain(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plain]:
    with plain_vllm(
        model_dir,
        latent_cases(),
        tmp_path_factory.mktemp("plain"),
        dtype=DTYPE,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=NUM_CONCURRENT,
        kv_cache_memory_bytes=64 << 20,
        **ENGINE_ARGS,
    ) as plain:
        yield plain


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(model_dir: Path, plain: Plain) -> AsyncIterator[Served]:
    async with (
        running(config(model_dir, "prefill", 1, tiers=POOL)) as prefill,
        running(config(model_dir, "decode", 2)) as decode,
    ):
        yield Served(model_dir, plain, prefill, decode)


async def idle(*hosts: Host) -> None:
    for host in hosts:
        await host.until_idle()


async def test_plain_vllm_draws_what_transformers_draws(served: Served) -> None:
    """Otherwise, equality with plain vLLM would show little."""
    if HAS_GPU:
        pytest.skip("Transformers judges in float32")
    todo, answers = served.decided()
    prompts = [case.prompt for case in todo]
    assert num_unlike_transformers(served.model_dir, prompts, answers) == 0
    others = [[1 + answer[0], *answer[1:]] for answer in answers]
    assert num_unlike_transformers(served.model_dir, prompts, others) == len(answers)


@pytest.mark.req("S1", "S3")
async def test_latents_handed_over_give_the_outputs_of_plain_vllm(served: Served) -> None:
    todo, expected = served.decided()
    if not HAS_GPU:  # on a GPU, near-ties cut the answers short
        assert max(map(len, expected)) > 2 * BLOCK_SIZE, "an answer fills blocks"
    run = Pair(served.prefill, served.decode, salt="whole")
    for _ in range(ROUNDS):
        got = await generate_all(run.generate, todo, NUM_CONCURRENT)
        assert differences(expected, got) == []
    assert run.num_computed_at_decode == 0
    assert run.num_handed_over == ROUNDS * len(todo)
    await idle(served.prefill, served.decode)


@pytest.mark.req("S48")
async def test_latents_handed_over_per_layer_give_the_outputs_of_plain_vllm(
    served: Served,
) -> None:
    todo, expected = served.decided()
    run = Pair(served.prefill, served.decode, salt="per-layer")
    got = await generate_all(run.generate_per_layer, todo, NUM_CONCURRENT)
    assert differences(expected, got) == []
    assert run.num_computed_at_decode == 0
    assert run.num_handed_over == len(todo)
    await idle(served.prefill, served.decode)


@pytest.mark.req("S3", "S47", "S57")
async def test_one_latent_of_each_token_and_layer_moves(served: Served) -> None:
    length = 4 * BLOCK_SIZE + 3
    prompt = random.Random(17).choices(VOCABULARY, k=length)
    run = Pair(served.prefill, served.decode, salt="bytes")
    await run.generate(prompt, Sampling(max_tokens=3))
    assert run.last_received is not None
    token_bytes = NUM_LAYERS * (LATENT + ROTATED) * NUM_BYTES
    assert served.decode.info.kv_bytes_per_token == token_bytes
    assert run.last_received.kv_bytes == 5 * BLOCK_SIZE * token_bytes
    await idle(served.prefill, served.decode)


@pytest.mark.req("S76", "S77")
async def test_a_prefix_from_the_host_pool_gives_equal_outputs(served: Served) -> None:
    """On a CPU, vLLM reuses no prefixes. All prefixes of the second round come from the pool."""
    todo, expected = served.decided()
    host, run = served.prefill, Pair(served.prefill, served.decode, salt="tiers")
    assert differences(expected, await generate_all(run.generate, todo, 1)) == []
    before = host.tier_counts.get(SERVED_BY_POOL, 0)
    assert differences(expected, await generate_all(run.generate, todo, NUM_CONCURRENT)) == []
    if not HAS_GPU:
        await host.until(lambda: host.tier_counts.get(SERVED_BY_POOL, 0) - before > 30)
    await idle(host, served.decode)


async def test_an_answer_goes_on_elsewhere_with_equal_outputs(served: Served) -> None:
    """A request that moves to another instance prefills its prompt and the tokens drawn so far."""
    if HAS_GPU:
        pytest.skip("in bfloat16, the kernels for a prompt and for a token round differently")
    todo, expected = served.decided()
    run = Pair(served.prefill, served.decode, salt="moves")

    async def moved(prompt: Sequence[int], sampling: Sampling) -> list[int]:
        first = (sampling.max_tokens + 1) // 2
        drawn = await run.generate(prompt, replace(sampling, max_tokens=first))
        rest = replace(sampling, max_tokens=sampling.max_tokens - first)
        return [*drawn, *(await run.generate([*prompt, *drawn], rest) if rest.max_tokens else ())]

    assert differences(expected, await generate_all(moved, todo, NUM_CONCURRENT)) == []
    await idle(served.prefill, served.decode)


@pytest.mark.req("S77")
async def test_the_comparison_fails_when_the_latents_are_zeroed_on_arrival(
    served: Served,
) -> None:
    todo, expected = served.decided()
    picked = [i for i, tokens in enumerate(expected) if len(tokens) >= 3]
    broken = config(served.model_dir, "broken", 3, failpoints="decode.pulled=zero-kv")
    async with running(broken) as decode:
        run = Pair(served.prefill, decode, salt="broken")
        got = await generate_all(run.generate, [todo[i] for i in picked], NUM_CONCURRENT)
    assert len(differences([expected[i] for i in picked], got)) > len(picked) // 2
    await idle(served.prefill)


@pytest.mark.nightly
@pytest.mark.req("S77")
async def test_the_comparison_fails_when_the_latents_from_the_pool_are_zeroed(
    served: Served,
) -> None:
    todo, expected = served.decided()
    long = [i for i, case in enumerate(todo) if len(case.prompt) > 2 * BLOCK_SIZE]
    # One case for each first block, so that nothing comes from the pool in the first round.
    picked = list({todo[i].prompt[:BLOCK_SIZE]: i for i in long}.values())
    todo, expected = [todo[i] for i in picked], [expected[i] for i in picked]
    small = config(served.model_dir, "spoilt", 4, tiers=POOL, failpoints="tier.loaded=zero-kv")
    if HAS_GPU:
        # the cache is so small that vLLM evicts prefixes
        small = replace(small, kv_cache_bytes=6 << 20)
    async with running(small) as prefill:
        run = Pair(prefill, served.decode, salt="spoilt")
        assert differences(expected, await generate_all(run.generate, todo, 1)) == []
        again = await generate_all(run.generate, todo, 1)
    assert len(differences(expected, again)) > len(todo) // 2
    await idle(served.decode)


@pytest.mark.nightly
@pytest.mark.req("S57", "S119")
@pytest.mark.parametrize(("at_prefill", "at_decode"), [(1, 2), (2, 1)])
async def test_any_numbers_of_ranks_meet_because_each_has_a_copy(
    model_dir: Path, plain: Plain, at_prefill: int, at_decode: int
) -> None:
    if HAS_GPU:
        pytest.skip("one GPU")
    todo, expected = clear(plain)
    first, second = (
        replace(config(model_dir, name, number), tensor_parallel_size=num_ranks)
        for name, number, num_ranks in (
            (f"prefill-of-{at_prefill}", 5, at_prefill),
            (f"decode-of-{at_decode}", 6, at_decode),
        )
    )
    async with running(first) as prefill, running(second) as decode:
        assert prefill.info.num_ranks != decode.info.num_ranks
        assert prefill.info.model_fingerprint == decode.info.model_fingerprint
        for generate in ((run := Pair(prefill, decode)).generate, run.generate_per_layer):
            assert differences(expected, await generate_all(generate, todo, 4)) == []
            run.salt = "per-layer"
        assert (run.num_handed_over, run.num_computed_at_decode) == (2 * len(todo), 0)
        await idle(prefill, decode)


@pytest.mark.nightly
@pytest.mark.skipif(HAS_GPU, reason="its kernels take other blocks")
async def test_another_size_of_blocks_than_the_kernel_s_ends_the_start_with_one_line(
    model_dir: Path,
) -> None:
    with pytest.raises(EngineMisconfigured, match="a block size of 16 tokens, not 64;") as caught:
        async with running(replace(config(model_dir, "refuses", 7), block_size=64)):
            pytest.fail("it started")
    assert "\n" not in caught.value.message
