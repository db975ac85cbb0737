"""A mesh with a real model gives its clients the same answers as plain vLLM.

Plain vLLM is vLLM without the mesh. The mesh has six services, as with `pdmesh up`. Prefill and
decode are separate processes, and KV moves over UCX.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import openai
import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from pdmesh.launcher.mesh import Mesh
from pdmesh.launcher.spec import MeshSpec
from tests.e2e.cases import Case
from tests.e2e.conftest import BLOCK_SIZE, DTYPE, Reference
from tests.support.sites import fleet
from tests.support.waiting import until

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default"),  # vLLM emits warnings
    pytest.mark.asyncio(loop_scope="session"),
]


def mesh_spec(model_dir: Path, num_pairs: int, num_fusion: int) -> MeshSpec:
    return MeshSpec(
        engine="vllm",
        num_prefill=num_pairs,
        num_decode=num_pairs,
        num_fusion=num_fusion,
        http_port=0,
        grpc_port=0,
        model_dir=model_dir,
        dtype=DTYPE,
        # On two cores, a request may wait long for a slot, which this test does not measure.
        env={"PDMESH_BLOCK_SIZE": str(BLOCK_SIZE), "PDMESH_GATEWAY_TTFT_S": "120"},
        start_timeout_s=240,
    )


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def mesh(
    model_dir: Path, reference: Reference, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Mesh]:
    """The mesh.

    It starts after the reference is computed, because two cores are too few for both.
    """
    async with Mesh(mesh_spec(model_dir, 1, 0), tmp_path_factory.mktemp("mesh")) as running:
        yield running


async def ask_all(url: str, todo: Sequence[Case], num_concurrent: int) -> list[str]:
    """The texts of /v1/completions in the order of `todo`.

    At most `num_concurrent` requests run at a time.
    """
    slots = asyncio.Semaphore(num_concurrent)
    async with openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", timeout=300, max_retries=0
    ) as client:

        async def ask(case: Case) -> str:
            async with slots:
                answer = await client.completions.create(
                    model="default",
                    prompt=list(case.prompt),
                    max_tokens=case.max_tokens,
                    temperature=0,
                    extra_body={"ignore_eos": True},
                )
            assert answer.usage is not None
            assert answer.usage.completion_tokens == case.max_tokens
            return answer.choices[0].text

        return list(await asyncio.gather(*map(ask, todo)))


def texts(model_dir: Path, tokens: Sequence[list[int]]) -> list[str]:
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    return [tokenizer.decode(t, skip_special_tokens=True).rstrip("\ufffd") for t in tokens]


def computed_at_decode(mesh: Mesh) -> float:
    samples = fleet.samples(mesh, "decode-0")
    return sum(v for name, _, v in samples if name == "pdmesh_kv_computed_tokens_total")


@pytest.mark.req("S1", "S3", "S13", "S47", "S49", "S73")
async def test_the_mesh_answers_as_plain_vllm_does(
    mesh: Mesh, reference: Reference, model_dir: Path
) -> None:
    got = await ask_all(mesh.http_url, reference.cases, num_concurrent=12)
    assert len(got) >= 200
    assert got == texts(model_dir, reference.tokens)
    pulled = {n: v for n, _, v in fleet.samples(mesh, "decode-0") if n.startswith("pdmesh_kv_")}
    assert pulled["pdmesh_kv_transfer_bytes_total"] > 0
    assert computed_at_decode(mesh) == 0
    await until(lambda: _nothing_held(mesh), within_s=15)


async def test_the_example_of_the_readme_gives_paris(mesh: Mesh) -> None:
    client = openai.AsyncOpenAI(base_url=f"{mesh.http_url}/v1", api_key="none", timeout=120)
    stream = await client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        temperature=0,  # `pdmesh chat` does the same
        stream=True,
    )
    parts = [c.choices[0].delta.content or "" async for c in stream if c.choices]
    assert "Paris" in "".join(parts)
    assert len(parts) > 2, "the answer came in pieces"
    await client.close()


async def test_every_token_comes_with_its_log_probability(mesh: Mesh) -> None:
    """Prefill draws token 1, and decode draws the others. All tokens have a log probability, and
    each greedy token is the likeliest.
    """
    async with openai.AsyncOpenAI(
        base_url=f"{mesh.http_url}/v1", api_key="none", timeout=120
    ) as client:
        whole = await client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            max_tokens=6,
            temperature=0,
            logprobs=True,
            top_logprobs=3,
        )
        choice = whole.choices[0]
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert len(choice.logprobs.content) == 6
        assert "".join(entry.token for entry in choice.logprobs.content) == choice.message.content
        for entry in choice.logprobs.content:
            likely = [other.logprob for other in entry.top_logprobs]
            assert len(likely) == 3
            assert likely == sorted(likely, reverse=True)
            assert entry.top_logprobs[0].token == entry.token
            assert entry.logprob == likely[0] <= 0
        stream = await client.completions.create(
            model="default",
            prompt="The capital of France is",
            max_tokens=6,
            temperature=0,
            logprobs=0,
            stream=True,
        )
        given = [chunk.choices[0].logprobs async for chunk in stream if chunk.choices]
        assert sum(len(g.token_logprobs or ()) for g in given if g is not None) == 6


@pytest.mark.nightly
@pytest.mark.req("S72")
async def test_fusion_answers_as_plain_vllm_does(
    reference: Reference, model_dir: Path, tmp_path: Path
) -> None:
    todo = reference.cases[:40]
    async with Mesh(mesh_spec(model_dir, 0, 1), tmp_path) as fusion:
        got = await ask_all(fusion.http_url, todo, num_concurrent=8)
    assert got == texts(model_dir, reference.tokens[: len(todo)])


async def _nothing_held(mesh: Mesh) -> bool:
    held = await fleet.held(mesh)
    return not {name: what for name, what in held.items() if name in mesh.names}


async def test_two_questions_at_once_do_not_mix(mesh: Mesh) -> None:
    client = openai.AsyncOpenAI(base_url=f"{mesh.http_url}/v1", api_key="none", timeout=120)

    async def ask(country: str) -> str:
        answer = await client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": f"What is the capital of {country}?"}],
            max_tokens=24,
            temperature=0,
        )
        return answer.choices[0].message.content or ""

    alone = [await ask("France"), await ask("Italy")]
    together = await asyncio.gather(ask("France"), ask("Italy"))
    assert list(together) == alone
    await client.close()
