"""A prefill and a decode draw the same tokens as plain vLLM, with models that have sliding windows.

Plain vLLM is vLLM without the mesh. Most prompts and some answers are longer than the window.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from safetensors.numpy import save_file
from transformers import AutoConfig

from pdmesh.engine.base import Sampling
from pdmesh.engine.vllm.config import VllmConfig
from pdmesh.errors import EngineMisconfigured
from pdmesh.kv.tiers.config import TierConfig
from tests.e2e.caches.tiny_windowed import (
    LAYER_BYTES,
    NUM_LAYERS,
    NUM_SLIDING,
    WINDOW,
    write_tiny_gemma,
    write_tiny_mistral,
)
from tests.e2e.cases import VOCABULARY, Case, differences, generate_all
from tests.e2e.conftest import ASYNC_SCHEDULING, DTYPE, Plain, plain_vllm
from tests.e2e.pair import Host, Pair, running

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),  # vLLM emits warnings
    pytest.mark.asyncio(loop_scope="module"),
]
BLOCK_SIZE = 32
MAX_MODEL_LEN = 768
POOL = TierConfig(host_pool_bytes=192 << 20, timeout_s=20.0)
SERVED_BY_POOL = ("host", "served")


@dataclass(frozen=True, slots=True)
class Kind:
    write: Callable[[Path], Path]
    num_full: int = 0  # layers that need all tokens
    num_windowed: int = 0


KINDS = {
    "sliding-and-full": Kind(
        write_tiny_gemma, num_full=NUM_LAYERS - NUM_SLIDING, num_windowed=NUM_SLIDING
    ),
    "sliding": Kind(write_tiny_mistral, num_windowed=NUM_LAYERS),
}


def windowed_cases(seed: int = 6) -> list[Case]:
    """Prompts whose lengths lie around blocks and the window, shared prefixes, and long answers."""
    rng = random.Random(seed)
    edges = [1, 31, 32, 33, *(WINDOW + d for d in (-1, 0, 1)), 127, 128, 129, 131, 132, 133, 500]
    shared = tuple(rng.choices(VOCABULARY, k=400))
    done: list[Case] = []
    for length in [*edges, *(rng.randint(2, 400) for _ in range(12))]:
        prompt = tuple(rng.choices(VOCABULARY, k=length))
        done.append(Case(prompt, rng.choice((2, 3, 5, 8))))
    for length in (150, 260, 261, 320, 400):
        own = tuple(rng.choices(VOCABULARY, k=60))
        done.append(Case(shared[:length] + own, 5))
    done += [Case(tuple(rng.choices(VOCABULARY, k=n)), WINDOW + 40) for n in (20, 90, 310)]
    return done


@dataclass(frozen=True, slots=True)
class Served:
    """A pair on one model, and the tokens that plain vLLM draws with this model."""

    kind: Kind
    model_dir: Path
    plain: Plain
    prefill: Host
    decode: Host

    def decided(self) -> tuple[list[Case], list[list[int]]]:
        return self.plain.decided(windowed_cases())


def config(model_dir: Path, instance_id: str, incarnation: int) -> VllmConfig:
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
        max_num_batched_tokens=192,  # long prompts are computed in several steps
        async_scheduling=ASYNC_SCHEDULING,
    )


@pytest.fixture(
    scope="module",
    params=[
        "sliding-and-full",
        pytest.param("sliding", marks=pytest.mark.nightly),
    ],
)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture(scope="module")
def model_dir(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kind.write(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def plain(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plain]:
    with plain_vllm(
        model_dir,
        windowed_cases(),
        tmp_path_factory.mktemp("plain"),
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        kv_cache_memory_bytes=64 << 20,
    ) as plain:
        yield plain


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(kind: Kind, model_dir: Path, plain: Plain) -> AsyncIterator[Served]:
    """A pair whose prefill has a small cache, so that it evicts prompts, and a host pool."""
    small = replace(config(model_dir, "prefill", 1), kv_cache_bytes=6 << 20, tiers=POOL)
    async with (
        running(small) as prefill,
        running(config(model_dir, "decode", 2)) as decode,
    ):
        yield Served(kind, model_dir, plain, prefill, decode)


async def idle(*hosts: Host) -> None:
    for host in hosts:
        await host.until_idle()


@pytest.mark.req("S1", "S3")
async def test_a_whole_prompt_handed_over_gives_the_outputs_of_plain_vllm(served: Served) -> None:
    todo, expected = served.decided()
    assert sum(len(case.prompt) > WINDOW for case in todo) > 15
    assert max(map(len, expected)) > WINDOW, "an answer leaves its prompt's window"
    run = Pair(served.prefill, served.decode, salt="whole")
    for _ in range(2):  # the second time, both sides find prefixes in their caches
        got = await generate_all(run.generate, todo, num_concurrent=4)
        assert differences(expected, got) == []
    assert run.num_computed_at_decode == 0
    assert run.num_handed_over > 50
    await idle(served.prefill, served.decode)


@pytest.mark.req("S48")
async def test_a_prompt_handed_over_per_layer_gives_the_outputs_of_plain_vllm(
    served: Served,
) -> None:
    todo, expected = served.decided()
    run = Pair(served.prefill, served.decode, salt="per-layer")
    for _ in range(2):
        got = await generate_all(run.generate_per_layer, todo, num_concurrent=4)
        assert differences(expected, got) == []
    assert run.num_computed_at_decode == 0
    assert run.num_handed_over > 50
    await idle(served.prefill, served.decode)


@pytest.mark.req("S3", "S47")
async def test_of_a_layer_with_a_window_only_the_window_moves(served: Served) -> None:
    """The token after a prompt of 500 tokens sees only the tokens from position 401 on. So such a
    layer's earlier blocks do not move.
    """
    prompt, size = random.Random(17).choices(VOCABULARY, k=500), BLOCK_SIZE
    num_blocks, first = -(-500 // size), (500 - WINDOW + 1) // size
    kind, run = served.kind, Pair(served.prefill, served.decode, salt="bytes")
    answer = await run.generate(prompt, Sampling(max_tokens=40))
    assert run.last_received is not None
    held = kind.num_full * num_blocks + kind.num_windowed * (num_blocks - first)
    assert run.last_received.kv_bytes == held * size * LAYER_BYTES
    assert run.num_computed_at_decode == 0
    # The next turn begins with tokens whose KV the decode has. Only the answer's last token has
    # none.
    turn = [*prompt, *answer, *random.Random(18).choices(VOCABULARY, k=60)]
    await run.generate(turn, Sampling(max_tokens=2))
    num_local, num_blocks, first = 539 // size, -(-600 // size), (600 - WINDOW + 1) // size
    held = kind.num_full * (num_blocks - num_local)
    held += kind.num_windowed * (num_blocks - max(num_local, first))
    assert run.last_received.kv_bytes == held * size * LAYER_BYTES
    await idle(served.prefill, served.decode)


@pytest.mark.req("S76", "S77")
async def test_evicted_blocks_come_from_the_host_pool_with_equal_outputs(served: Served) -> None:
    todo, expected = served.decided()
    host = served.prefill
    run = Pair(host, served.decode, salt="tiers")
    assert differences(expected, await generate_all(run.generate, todo, 1)) == []
    before = host.tier_counts.get(SERVED_BY_POOL, 0)
    assert differences(expected, await generate_all(run.generate, todo, 1)) == []
    await host.until(lambda: host.tier_counts.get(SERVED_BY_POOL, 0) - before > 30)
    await idle(host, served.decode)


async def test_an_answer_goes_on_elsewhere_with_equal_outputs(served: Served) -> None:
    """A request that moves to another instance prefills its prompt and the tokens drawn so far."""
    todo, expected = served.decided()
    run = Pair(served.prefill, served.decode, salt="moves")

    async def moved(prompt: Sequence[int], sampling: Sampling) -> list[int]:
        first = (sampling.max_tokens + 1) // 2
        drawn = await run.generate(prompt, replace(sampling, max_tokens=first))
        rest = replace(sampling, max_tokens=sampling.max_tokens - first)
        return [*drawn, *(await run.generate([*prompt, *drawn], rest) if rest.max_tokens else ())]

    assert differences(expected, await generate_all(moved, todo, num_concurrent=4)) == []
    await idle(served.prefill, served.decode)


@pytest.mark.req("S77")
async def test_the_comparison_fails_when_the_kv_is_zeroed_on_arrival(served: Served) -> None:
    todo, expected = served.decided()
    picked = [i for i, case in enumerate(todo) if case.max_tokens >= 3]
    broken = replace(
        config(served.model_dir, "broken", 3),
        failpoints="decode.pulled=zero-kv",
    )
    async with running(broken) as decode:
        run = Pair(served.prefill, decode, salt="broken")
        got = await generate_all(run.generate, [todo[i] for i in picked], 4)
    assert len(differences([expected[i] for i in picked], got)) > len(picked) // 2
    await idle(served.prefill)


@pytest.mark.nightly
@pytest.mark.req("S77")
async def test_the_comparison_fails_when_the_kv_from_the_pool_is_zeroed(served: Served) -> None:
    todo, expected = served.decided()
    picked = [i for i, case in enumerate(todo) if len(case.prompt) > WINDOW + BLOCK_SIZE]
    todo, expected = [todo[i] for i in picked], [expected[i] for i in picked]
    small = replace(config(served.model_dir, "spoilt", 5), kv_cache_bytes=6 << 20, tiers=POOL)
    async with running(replace(small, failpoints="tier.loaded=zero-kv")) as prefill:
        run = Pair(prefill, served.decode, salt="spoilt")
        assert differences(expected, await generate_all(run.generate, todo, 1)) == []
        again = await generate_all(Pair(prefill, served.decode, salt="spoilt").generate, todo, 1)
    assert len(differences(expected, again)) > len(todo) // 3
    await idle(served.decode)


@pytest.mark.nightly
@pytest.mark.req("S57")
async def test_two_ranks_hand_over_the_layers_of_every_group(model_dir: Path, plain: Plain) -> None:
    todo, expected = plain.decided(windowed_cases())
    first, second = (
        replace(config(model_dir, name, number), tensor_parallel_size=2)
        for name, number in (("prefill-ranks", 6), ("decode-ranks", 7))
    )
    async with running(first) as prefill, running(second) as decode:
        assert prefill.info.num_ranks == 2
        run = Pair(prefill, decode, salt="ranks")
        assert differences(expected, await generate_all(run.generate, todo, 4)) == []
        run = Pair(prefill, decode, salt="ranks per layer")
        assert differences(expected, await generate_all(run.generate_per_layer, todo, 4)) == []
        assert run.num_computed_at_decode == 0
        await idle(prefill, decode)


@pytest.mark.nightly
@pytest.mark.req("S1", "S3", "S77")
async def test_a_window_alone_is_handed_over_and_a_spoilt_one_is_seen(tmp_path: Path) -> None:
    """All layers have a window, so only windows move. The decode zeroes the KV of later pulls."""
    rng, lengths = random.Random(23), (90, 101, 133, 200, 260, 310)
    cases = [Case(tuple(rng.choices(VOCABULARY, k=n)), 8) for n in lengths]
    (folder := tmp_path / "model").mkdir()
    model_dir = write_tiny_mistral(folder)
    with plain_vllm(
        model_dir, cases, tmp_path, block_size=BLOCK_SIZE, max_model_len=MAX_MODEL_LEN
    ) as plain:
        todo, expected = plain.decided(cases)
    assert len(todo) > len(cases) // 2
    first_spoilt = len(todo) + 1
    spoiling = replace(
        config(model_dir, "decode-spoils", 9), failpoints=f"decode.pulled=zero-kv@{first_spoilt}+"
    )
    async with (
        running(config(model_dir, "prefill-alone", 8)) as prefill,
        running(spoiling) as decode,
    ):
        run = Pair(prefill, decode, salt="whole")
        assert differences(expected, await generate_all(run.generate, todo, 1)) == []
        assert (run.num_handed_over, run.num_computed_at_decode) == (len(todo), 0)
        again = Pair(prefill, decode, salt="spoilt")
        got = await generate_all(again.generate, todo, 1)
        assert len(differences(expected, got)) > len(todo) // 2
        await idle(prefill, decode)


_FEW_LAYERS = {"num_hidden_layers": 4, "hidden_size": 256, "vocab_size": 1000}
_SHARES = {
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "intermediate_size": [512] * 4,
    "activation_sparsity_pattern": [0.0] * 4,
}
# A full layer keeps twice as many bytes per token as a sliding layer.
_UNEQUAL = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "global_head_dim": 128,
    "vocab_size_per_layer_input": 1000,
    "hidden_size_per_layer_input": 0,
    "max_position_embeddings": 1024,
}


@pytest.mark.parametrize(
    ("model_type", "architecture", "feature", "more"),
    [
        ("mamba", "MambaForCausalLM", "state-space layers alone", {}),
        ("gemma3n_text", "Gemma3nForCausalLM", "layers that use the KV of other layers", _SHARES),
    ],
)
async def test_a_model_with_another_state_ends_the_start_with_one_line(
    tmp_path: Path, model_type: str, architecture: str, feature: str, more: dict[str, object]
) -> None:
    facts = AutoConfig.for_model(model_type, **_FEW_LAYERS | more, architectures=[architecture])
    facts.save_pretrained(tmp_path)
    save_file({"x": np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(EngineMisconfigured, match=f"^tiny has {feature}: ") as caught:
        async with running(config(tmp_path, "refuses", 4)):
            pytest.fail("it started")
    assert caught.value.reason == "MODEL_UNSUPPORTED"


@pytest.mark.nightly
async def test_a_cache_that_only_vllm_s_own_processes_see_ends_the_start_with_one_line(
    tmp_path: Path,
) -> None:
    facts = AutoConfig.for_model(
        "gemma4_text", **_FEW_LAYERS | _UNEQUAL, architectures=["Gemma4ForCausalLM"]
    )
    facts.save_pretrained(tmp_path)
    save_file({"x": np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    dummy = replace(config(tmp_path, "refuses", 4), engine_args={"load_format": "dummy"})
    with pytest.raises(EngineMisconfigured, match=r"^tiny: .*docs/cache-kinds\.md") as caught:
        async with running(dummy):
            pytest.fail("it started")
    assert caught.value.reason == "MODEL_UNSUPPORTED"
    assert "\n" not in caught.value.message
