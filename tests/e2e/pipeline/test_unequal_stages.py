"""Pipelines with unequal numbers of ranks or layers in their stages draw the right tokens.

The answers must equal those of plain vLLM, which is vLLM without the mesh.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import pytest_asyncio

from pdmesh.core.kv.layout.compatibility import parse
from pdmesh.engine.base import Sampling
from tests.e2e.cases import VOCABULARY, differences, generate_all
from tests.e2e.conftest import Plain
from tests.e2e.mesh.test_ranks import BLOCK_SIZE
from tests.e2e.pair import Pair, running
from tests.e2e.pipeline import test_pair as equal
from tests.e2e.pipeline.test_pair import TOKEN_BYTES, config, idle, stage_cases
from tests.fakes.tiny_llama import NUM_LAYERS

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),  # vLLM emits warnings
    pytest.mark.asyncio(loop_scope="module"),
]
tiny_llama, plain = equal.tiny_llama, equal.plain  # these are fixtures


@dataclass(frozen=True, slots=True)
class Shape:
    """The ranks of a stage at prefill and at decode, and the layers of each stage on both sides."""

    at_prefill: int
    at_decode: int
    stages: tuple[int, ...]


SHAPES = {
    "1-to-2": Shape(1, 2, (2, 2)),
    "2-to-1": Shape(2, 1, (2, 2)),
    "3+1": Shape(1, 1, (3, 1)),
    "1+3": Shape(1, 1, (1, 3)),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=SHAPES)
async def unequal(
    request: pytest.FixtureRequest, tiny_llama: Path, plain: Plain
) -> AsyncIterator[Pair]:
    plain.tokens()  # wait until plain vLLM has ended before six ranks start
    shape = SHAPES[request.param]
    prefill, decode = (
        replace(config(tiny_llama, name, number), tensor_parallel_size=num_ranks)
        for name, number, num_ranks in (
            ("prefill-0", 1, shape.at_prefill),
            ("decode-0", 2, shape.at_decode),
        )
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_PP_LAYER_PARTITION", ",".join(map(str, shape.stages)))
        async with running(prefill) as first, running(decode) as second:
            kind = parse(first.info.model_fingerprint)
            assert kind is not None
            assert kind.stages == shape.stages
            yield Pair(first, second)


@pytest.mark.req("S120", "S57", "S48", "S1")
async def test_a_rank_finds_its_layers_and_heads(unequal: Pair, plain: Plain) -> None:
    todo, expected = plain.decided(stage_cases())
    assert unequal.prefill.info.model_fingerprint == unequal.decode.info.model_fingerprint
    for salt in ("whole", "layers"):
        run = Pair(unequal.prefill, unequal.decode, salt=salt)
        generate = run.generate if salt == "whole" else run.generate_per_layer
        assert differences(expected, await generate_all(generate, todo, 4)) == []
        assert run.num_computed_at_decode == 0
        assert run.num_handed_over == sum(case.max_tokens > 1 for case in todo)
    await idle(unequal.prefill, unequal.decode)


@pytest.mark.req("S120", "S57")
async def test_no_byte_moves_twice(unequal: Pair) -> None:
    """A ticket states the bytes of a rank of the largest stage, but each rank moves only its
    own.
    """
    prompt = random.Random(9).choices(VOCABULARY, k=300)
    first = await unequal.prefilled(prompt, sampling := Sampling(max_tokens=4))
    assert first.ticket is not None
    num_tokens = -(-len(prompt) // BLOCK_SIZE) * BLOCK_SIZE
    kind = parse(first.ticket.model_fingerprint)
    assert kind is not None
    of_largest = num_tokens * TOKEN_BYTES * max(kind.stages) // NUM_LAYERS
    num_beside = len(first.ticket.addresses) // kind.num_stages
    assert first.ticket.kv_bytes == of_largest // num_beside
    await unequal.decoded(prompt, first.token, first.ticket, sampling)
    assert unequal.last_received is not None
    assert unequal.last_received.kv_bytes == num_tokens * TOKEN_BYTES
    await idle(unequal.prefill, unequal.decode)
