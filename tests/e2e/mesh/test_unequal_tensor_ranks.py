"""A prefill and a decode with unequal numbers of tensor-parallel ranks draw the right tokens.

The answers must equal those of plain vLLM, which is vLLM without the mesh. One side has one rank,
and the other has two. A rank takes the heads that it needs from the ranks that hold them. On a CPU,
vLLM has its own layout within a head's block. But it stores the heads one after another, so a rank
can take single heads. Plain vLLM has one rank. Two ranks add in another order, so the comparison
leaves out answers that rounding may change.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from pdmesh.core.model import DomainRank
from tests.e2e.cases import differences, generate_all
from tests.e2e.conftest import Plain, plain_vllm
from tests.e2e.mesh.test_ranks import BLOCK_SIZE, config, rank_cases
from tests.e2e.pair import Pair, running
from tests.fakes.tiny_llama import write_tiny_llama

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),  # vLLM emits warnings
    pytest.mark.asyncio(loop_scope="module"),
]
RANKS = [(1, 2), (2, 1)]  # numbers of ranks at prefill and at decode


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="module")
def plain(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plain]:
    with plain_vllm(
        tiny_llama,
        rank_cases(),
        tmp_path_factory.mktemp("plain"),
        block_size=BLOCK_SIZE,
        max_model_len=1024,
        kv_cache_memory_bytes=64 << 20,
    ) as plain:
        plain.tokens()  # wait until plain vLLM has ended before three ranks start
        yield plain


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=RANKS)
async def unequal(
    request: pytest.FixtureRequest, tiny_llama: Path, plain: Plain
) -> AsyncIterator[Pair]:
    at_prefill, at_decode = request.param
    prefill = replace(config(tiny_llama, "prefill-0", 1), tensor_parallel_size=at_prefill)
    decode = replace(config(tiny_llama, "decode-0", 2), tensor_parallel_size=at_decode)
    async with running(prefill) as first, running(decode) as second:
        yield Pair(first, second)


@pytest.mark.req("S57", "S119", "S1")
async def test_a_pair_of_unequal_ranks_draws_what_plain_vllm_draws(
    unequal: Pair, plain: Plain
) -> None:
    todo, expected = plain.decided(rank_cases())
    assert len(todo) > len(rank_cases()) // 2
    assert unequal.prefill.info.num_ranks != unequal.decode.info.num_ranks
    assert unequal.prefill.info.model_fingerprint == unequal.decode.info.model_fingerprint
    got = await generate_all(unequal.generate, todo, num_concurrent=4)
    assert differences(expected, got) == []
    assert unequal.num_handed_over == len(todo)
    assert unequal.num_computed_at_decode == 0
    await unequal.prefill.until_idle()
    await unequal.decode.until_idle()


@pytest.mark.req("S57", "S75", "S121")
async def test_ranks_of_a_domain_with_two_tensor_parallel_ranks_each_find_their_heads(
    plain: Plain, tiny_llama: Path
) -> None:
    """The prefill has one rank. Both data-parallel ranks of a decode take heads from it. Each of
    them announces its own engine's addresses and fingerprint.
    """
    todo, expected = plain.decided(rank_cases())
    todo, expected = todo[:12], expected[:12]
    prefill = replace(config(tiny_llama, "prefill-0", 1), tensor_parallel_size=1)
    members = [
        replace(
            config(tiny_llama, f"decode-{n}", 2 + n),
            domain=DomainRank("chat-d7", n, 2, "127.0.0.1:29677"),
        )
        for n in range(2)
    ]
    async with (
        running(prefill) as source,
        running(members[0]) as first,
        running(members[1]) as second,
    ):
        for decode in (first, second):
            assert decode.info.num_ranks == 2
            assert decode.info.model_fingerprint == source.info.model_fingerprint
            pair = Pair(source, decode)
            assert differences(expected, await generate_all(pair.generate, todo, 4)) == []
            assert pair.num_handed_over == len(todo)
            assert pair.num_computed_at_decode == 0
        assert set(first.info.kv_addresses).isdisjoint(second.info.kv_addresses)
        for host in (source, first, second):
            await host.until_idle()


@pytest.mark.req("S57")
async def test_the_comparison_sees_kv_that_was_zeroed_on_arrival(
    unequal: Pair, plain: Plain, tiny_llama: Path
) -> None:
    broken = replace(
        config(tiny_llama, "decode-1", 3),
        tensor_parallel_size=unequal.decode.info.num_ranks,
        failpoints="decode.pulled=zero-kv",
    )
    cases, expected = plain.decided(rank_cases())
    todo = [i for i, case in enumerate(cases) if len(case.prompt) > 30][:8]
    async with running(broken) as decode:
        pair = Pair(unequal.prefill, decode)
        got = await generate_all(pair.generate, [cases[i] for i in todo], 4)
    assert len(differences([expected[i] for i in todo], got)) > len(todo) // 2
