"""A prefill and a decode draw the same tokens as plain vLLM, with models that have states.

In these models, some layers keep a state and the others have attention. Plain vLLM is vLLM without
the mesh. Transformers in float32 checks the tokens of plain vLLM. The pair runs several requests at
once. Plain vLLM also does so, except in bfloat16.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import pytest_asyncio

from pdmesh.engine.base import KvReceived, Prefilled, Sampling, Tokens
from pdmesh.engine.vllm.config import VllmConfig
from pdmesh.engine.vllm.model.rotation import ROTATION
from pdmesh.errors import EngineFailed, EngineMisconfigured
from pdmesh.kv.tiers.config import TierConfig
from tests.e2e.caches.tiny_stateful import (
    NUM_LAYERS,
    NUM_STATES,
    write_tiny_granite,
    write_tiny_lfm2,
    write_tiny_qwen3_next,
    write_tiny_zamba2,
)
from tests.e2e.caches.transformers_answers import num_unlike_transformers
from tests.e2e.cases import VOCABULARY, Case, Generate, differences, generate_all
from tests.e2e.conftest import ASYNC_SCHEDULING, NEAR_TIE, Plain, plain_vllm
from tests.e2e.pair import Host, Pair, running

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),  # vLLM emits warnings
    pytest.mark.asyncio(loop_scope="module"),
]


NUM_AT_ONCE = 4
RIGHT_ROTATION = {"compilation_config": {"custom_ops": ["all", f"-{ROTATION}"]}}


@dataclass(frozen=True, slots=True)
class Kind:
    write: Callable[[Path], Path]
    block_size: int
    dtype: str = "float32"
    num_step_blocks: int = 4  # the most blocks that a step computes
    near_tie: float = NEAR_TIE  # a margin of log probabilities that rounding may reverse
    num_at_once: int = NUM_AT_ONCE  # requests that plain vLLM runs at once
    # The model passes [tokens, heads, size], which vLLM's CPU kernel rotates wrongly.
    has_heads_apart: bool = False


KINDS = {
    "short-convolution": Kind(write_tiny_lfm2, 32, has_heads_apart=True),
    "delta-rule": Kind(write_tiny_qwen3_next, 128, "bfloat16", 2, near_tie=0.2, num_at_once=1),
    # On a CPU, vLLM 0.32 fails if a step of Mamba-2 crosses the end of a block.
    "mamba-2": Kind(write_tiny_granite, 32, num_step_blocks=1),
}


def stateful_cases(block_size: int, seed: int = 6) -> list[Case]:
    """Prompts whose lengths lie around blocks, shared prefixes, and an answer over several blocks.

    A state is valid only after exactly the tokens that it has seen, so each of these lengths
    matters. The last case but one is a prompt of whole blocks. The last case is a longer prompt
    that begins with it.
    """
    rng, size = random.Random(seed), block_size
    edges = [1, 2, *(k * size + d for k in (1, 2, 4) for d in (-1, 0, 1)), 5 * size + size // 2]
    shared = tuple(rng.choices(VOCABULARY, k=3 * size))
    cases = [Case(tuple(rng.choices(VOCABULARY, k=n)), rng.choice((3, 5, 8))) for n in edges]
    prefixes = [shared[:length] for length in (size, 2 * size - 1, 2 * size, 3 * size)]
    cases += [Case((*each, *rng.choices(VOCABULARY, k=size // 2)), 5) for each in prefixes]
    lengths, answer = (size // 2, 2 * size), size + size // 2
    cases += [Case(tuple(rng.choices(VOCABULARY, k=n)), answer) for n in lengths]
    again = tuple(rng.choices(VOCABULARY, k=3 * size))
    return [*cases, Case(again, 5), Case((*again, *rng.choices(VOCABULARY, k=size // 2)), 5)]


@dataclass(frozen=True, slots=True)
class Served:
    """A pair on one model, and the tokens that plain vLLM draws with this model."""

    kind: Kind
    model_dir: Path
    plain: Plain
    prefill: Host
    decode: Host

    def decided(self) -> tuple[list[Case], list[list[int]]]:
        """The cases and answers, each cut at its first near-tie.

        A near-tie is a step in which two tokens are almost equally likely. Cases that begin with a
        near-tie are left out.
        """
        cases = stateful_cases(self.kind.block_size)
        todo, expected = self.plain.cut(cases, self.kind.near_tie)
        kept = [i for i, tokens in enumerate(expected) if tokens]
        assert len(kept) > len(cases) // 2
        return [todo[i] for i in kept], [expected[i] for i in kept]

    def moved_bytes(self, num_blocks: int) -> int:
        """The bytes of a hand-over of these blocks. A layer with a state sends only one block."""
        block_bytes = self.decode.info.kv_bytes_per_token * self.kind.block_size
        return (block_bytes // NUM_LAYERS) * ((NUM_LAYERS - NUM_STATES) * num_blocks + NUM_STATES)


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
        max_num_seqs=kind.num_at_once,
        max_num_batched_tokens=kind.num_step_blocks * kind.block_size,
        kv_cache_memory_bytes=64 << 20,
        **(RIGHT_ROTATION if kind.has_heads_apart else {}),
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


async def test_plain_vllm_draws_what_transformers_draws(served: Served) -> None:
    """Otherwise, equality with plain vLLM would show little."""
    short = 2 * served.kind.block_size + 1  # Transformers takes too long for longer prompts
    judged = [pair for pair in zip(*served.decided(), strict=True) if len(pair[0].prompt) <= short]
    prompts, answers = [case.prompt for case, _ in judged], [answer for _, answer in judged]
    assert num_unlike_transformers(served.model_dir, prompts, answers) == 0
    others = [[1 + answer[0], *answer[1:]] for answer in answers]
    assert num_unlike_transformers(served.model_dir, prompts, others) == len(judged) > 4


@pytest.mark.req("S1", "S3")
async def test_a_prompts_state_handed_over_gives_the_outputs_of_plain_vllm(served: Served) -> None:
    todo, expected = served.decided()
    run = Pair(served.prefill, served.decode, salt="whole")
    for _ in range(2):  # the second time, both sides find prefixes in their caches
        assert differences(expected, await generate_all(run.generate, todo, NUM_AT_ONCE)) == []
    assert run.num_computed_at_decode == 0
    assert run.num_handed_over > len(todo) // 2
    await idle(served.prefill, served.decode)


@pytest.mark.req("S1")
async def test_answers_that_fill_blocks_of_states_leave_plain_vllm_s_at_near_ties_only(
    served: Served,
) -> None:
    """Requests run one at a time. Answers are not cut at near-ties, where rounding decides."""
    todo, expected = stateful_cases(served.kind.block_size), served.plain.tokens()
    run = Pair(served.prefill, served.decode, salt="long")
    got = await generate_all(run.generate, todo, 1)
    num_equal = [equal_tokens(*pair) for pair in zip(expected, got, strict=True)]
    left = [i for i, tokens in enumerate(expected) if num_equal[i] < len(tokens)]
    margins = {i: served.plain.margins()[i][num_equal[i]] for i in left}
    assert all(margin <= served.kind.near_tie for margin in margins.values()), margins
    assert max(num_equal) > served.kind.block_size
    assert run.num_computed_at_decode == 0
    await idle(served.prefill, served.decode)


@pytest.mark.req("S48")
async def test_a_state_handed_over_per_layer_gives_the_outputs_of_plain_vllm(
    served: Served,
) -> None:
    todo, expected = served.decided()
    run = Pair(served.prefill, served.decode, salt="per-layer")
    for _ in range(2):
        got = await generate_all(run.generate_per_layer, todo, NUM_AT_ONCE)
        assert differences(expected, got) == []
    assert run.num_computed_at_decode == 0
    assert run.num_handed_over > len(todo) // 2
    await idle(served.prefill, served.decode)


@pytest.mark.req("S3", "S47")
async def test_of_a_layer_with_a_state_one_block_moves(served: Served) -> None:
    size = served.kind.block_size
    prompt = random.Random(17).choices(VOCABULARY, k=4 * size + 3)
    run = Pair(served.prefill, served.decode, salt="bytes")
    await run.generate(prompt, Sampling(max_tokens=3))
    assert run.last_received is not None
    assert run.last_received.kv_bytes == served.moved_bytes(5)
    await idle(served.prefill, served.decode)


@pytest.mark.req("S3")
async def test_a_prompt_that_comes_again_and_a_longer_one_find_the_prefix(served: Served) -> None:
    """The prompt has three whole blocks.

    The decode pulled the state at the end of the third block, so it has this state. The prefill has
    to compute the last token, so it can use only the state at the end of the second block.
    """
    todo, expected = served.decided()
    size = served.kind.block_size
    assert [len(case.prompt) for case in todo[-2:]] == [3 * size, 3 * size + size // 2]
    run = Pair(served.prefill, served.decode, salt="prefixes")

    async def asked(number: int) -> tuple[int, int]:
        """Send a case. Return the tokens that the prefill found, and the bytes that the decode
        pulled.
        """
        case = todo[number]
        first = await run.prefilled(case.prompt, case.sampling())
        assert first.ticket is not None
        rest = await run.decoded(case.prompt, first.token, first.ticket, case.sampling())
        assert [first.token, *rest] == expected[number]
        assert run.last_received is not None
        return first.num_cached_tokens, run.last_received.kv_bytes

    assert await asked(-2) == (0, served.moved_bytes(3))
    assert await asked(-2) == (2 * size, 0)
    assert await asked(-1) == (3 * size, served.moved_bytes(1))
    assert await asked(-1) == (3 * size, served.moved_bytes(1))
    assert run.num_computed_at_decode == 0
    await idle(served.prefill, served.decode)


@pytest.mark.req("S1")
@pytest.mark.parametrize("way", ["whole", "per-layer"])
async def test_an_answer_goes_on_elsewhere(served: Served, way: str) -> None:
    """A request that moves to another instance prefills its prompt and the tokens drawn so far."""
    todo, expected = served.decided()
    run = Pair(served.prefill, served.decode, salt=f"moves {way}")
    generate = run.generate if way == "whole" else run.generate_per_layer
    got = await generate_all(moving(generate, generate), todo, NUM_AT_ONCE)
    assert differences(expected, got) == []
    assert run.num_computed_at_decode == 0
    assert run.num_handed_over > len(todo) // 2
    await idle(served.prefill, served.decode)


@pytest.mark.req("S1")
@pytest.mark.fault("F7")
async def test_a_request_goes_on_when_its_decode_is_killed(served: Served) -> None:
    todo, expected = served.decided()
    number = max(range(len(todo)), key=lambda i: len(expected[i]))
    case, answer = todo[number], expected[number]
    assert len(answer) >= 4
    async with running(config(served.kind, served.model_dir, "doomed", 5)) as doomed:
        drawn = await drawn_before_a_kill(Pair(served.prefill, doomed, "killed"), case)
    assert drawn == answer[: len(drawn)]
    assert len(answer) // 2 <= len(drawn) < len(answer)
    run = Pair(served.prefill, served.decode, salt="killed")
    rest = replace(case.sampling(), max_tokens=len(answer) - len(drawn))
    assert [*drawn, *await run.generate([*case.prompt, *drawn], rest)] == answer
    await idle(served.prefill, served.decode)


@pytest.mark.req("S77")
async def test_the_comparison_fails_when_only_the_states_are_zeroed(served: Served) -> None:
    todo, expected = served.decided()
    picked = [i for i, tokens in enumerate(expected) if len(tokens) >= 3]
    todo, expected = [todo[i] for i in picked], [expected[i] for i in picked]
    broken = replace(
        config(served.kind, served.model_dir, "broken", 3),
        failpoints="decode.pulled=zero-states",
    )
    async with running(broken) as decode:
        spoilt = Pair(served.prefill, decode, salt="broken")
        got = await generate_all(spoilt.generate, todo, NUM_AT_ONCE)
        assert len(differences(expected, got)) > len(picked) // 2
        right = Pair(served.prefill, served.decode, salt="broken move")
        spoilt = Pair(served.prefill, decode, salt="broken move")
        long = [i for i, tokens in enumerate(expected) if len(tokens) >= 4]
        got = await generate_all(
            moving(right.generate, spoilt.generate), [todo[i] for i in long], NUM_AT_ONCE
        )
        assert len(differences([expected[i] for i in long], got)) > len(long) // 3
    await idle(served.prefill, served.decode)


def equal_tokens(some: Sequence[int], others: Sequence[int]) -> int:
    """The number of tokens before the first difference of two answers of one length."""
    assert len(some) == len(others)
    pairs = enumerate(zip(some, others, strict=True))
    return next((i for i, (one, other) in pairs if one != other), len(some))


def moving(first: Generate, then: Generate) -> Generate:
    """A function that draws half of an answer with `first`, and the rest with `then`."""

    async def moved(prompt: Sequence[int], sampling: Sampling) -> list[int]:
        half = (sampling.max_tokens + 1) // 2
        drawn = await first(prompt, replace(sampling, max_tokens=half))
        rest = replace(sampling, max_tokens=sampling.max_tokens - half)
        return [*drawn, *(await then([*prompt, *drawn], rest) if rest.max_tokens else ())]

    return moved


async def drawn_before_a_kill(run: Pair, case: Case) -> list[int]:
    """Kill the decode's worker when half of the answer is there, and return the tokens so far."""
    first = await run.prefilled(case.prompt, case.sampling())
    assert isinstance(first, Prefilled)
    assert first.ticket is not None
    leg = await run.start_decode(case.prompt, first.token, first.ticket, case.sampling())
    assert isinstance(await run.decode.next_output(leg), KvReceived)
    drawn = [first.token]
    while len(drawn) < case.max_tokens // 2:
        output = await run.decode.next_output(leg)
        assert isinstance(output, Tokens)
        drawn += output.token_ids
    os.kill(run.decode.engine.worker_pids[0], signal.SIGKILL)
    with pytest.raises(EngineFailed):
        await asyncio.wait_for(run.decode.ended, 60)
    return drawn


async def test_states_with_tiers_are_refused_in_one_line(kind: Kind, model_dir: Path) -> None:
    pooled = replace(
        config(kind, model_dir, "refuses", 4), tiers=TierConfig(host_pool_bytes=64 << 20)
    )
    with pytest.raises(EngineMisconfigured, match="tiers keep no states") as caught:
        async with running(pooled):
            pytest.fail("it started")
    assert caught.value.reason == "MODEL_UNSUPPORTED"
    assert "\n" not in caught.value.message


@pytest.mark.nightly
async def test_steps_that_would_end_mamba_2_on_a_cpu_are_refused_in_one_line(
    tmp_path: Path,
) -> None:
    kind = KINDS["mamba-2"]
    asked = replace(
        config(kind, write_tiny_granite(tmp_path), "refuses", 6),
        max_num_batched_tokens=2 * kind.block_size,
    )
    with pytest.raises(EngineMisconfigured, match="max_num_batched_tokens to 32") as caught:
        async with running(asked):
            pytest.fail("it started")
    assert "\n" not in caught.value.message


@pytest.mark.nightly
@pytest.mark.req("S48")
async def test_layers_computed_in_another_order_than_built_are_not_sent_too_early(
    tmp_path: Path,
) -> None:
    """If a layer is sent too early, its blocks have their earlier content. Long prompts reveal
    this.
    """
    kind, rng = KINDS["mamba-2"], random.Random(3)
    asked = replace(
        config(kind, write_tiny_zamba2(tmp_path), "prefill-zamba", 11),
        max_model_len=1024,
        kv_cache_bytes=128 << 20,
    )
    lengths = (608, 640, 671, 704, 768, 800, 832, 863)
    cases = [Case(tuple(rng.choices(VOCABULARY, k=length)), 24) for length in lengths]
    async with (
        running(asked) as prefill,
        running(replace(asked, instance_id="decode-zamba", incarnation=12)) as decode,
    ):
        whole = await generate_all(Pair(prefill, decode, salt="whole").generate, cases, 1)
        pair = Pair(prefill, decode, salt="per layer")
        assert differences(whole, await generate_all(pair.generate_per_layer, cases, 1)) == []
        assert pair.num_computed_at_decode == 0
