"""A whole vLLM mesh answers chats about images as plain vLLM does, also when an instance dies.

Plain vLLM is vLLM without the mesh. The model is a LLaVA with random weights. The test writes
prompts in the form of the model's chat template.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from pdmesh.core.images.header import read_header
from pdmesh.launcher.mesh import Mesh
from pdmesh.launcher.spec import MeshSpec
from tests.e2e.cases import Case
from tests.e2e.conftest import DTYPE, plain_vllm
from tests.e2e.images.test_engine import VISION, picture
from tests.e2e.images.tiny_llava import IMAGE, NUM_IMAGE_TOKENS, write_tiny_llava
from tests.support.images.encoders import until_encoding
from tests.support.sites import fleet

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),  # vLLM emits warnings
    pytest.mark.asyncio(loop_scope="session"),
]
NUM_TOKENS = 200
DECODES = ("decode-0", "decode-1")
CHATS = [(("What is it?",), (0,)), (("What is it?",), (1,)), (("And", "and?"), (1, 0)), ((), (2,))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llava(tmp_path_factory.mktemp("models") / "llava")


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """The answers of plain vLLM, each cut at its first near-tie.

    At a near-tie, two tokens are almost equally likely, so rounding may decide.
    """
    folder = tmp_path_factory.mktemp("pictures")
    for seed in range(3):
        (folder / str(seed)).write_bytes(picture(seed))
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    cases = []
    for texts, images in CHATS:
        shown = "".join("<image>\n" for _ in images) + "".join(texts)
        ids = tokenizer.encode(f"<s>user: {shown}\nassistant: ", add_special_tokens=False).ids
        cases.append(
            Case(tuple(ids), NUM_TOKENS, images=tuple(str(folder / str(i)) for i in images))
        )
    with plain_vllm(model, cases, folder, **VISION) as plain:
        tokens = plain.decided(cases)[1]
    assert len({tuple(answer[:3]) for answer in tokens}) == len(CHATS)
    return tokens


def spec(model: Path, num_decode: int) -> MeshSpec:
    return MeshSpec(
        engine="vllm", num_prefill=1, num_decode=num_decode, http_port=0, grpc_port=0,
        model_dir=model, dtype=DTYPE, start_timeout_s=300,
        env={
            "PDMESH_MAX_MODEL_LEN": "1024", "PDMESH_GATEWAY_TTFT_S": "120",
            "PDMESH_PREFILL_KV_CACHE_BYTES": str(64 << 20),
            "PDMESH_DECODE_KV_CACHE_BYTES": str(64 << 20),
            "PDMESH_INSTANCE_KV_CACHE_BYTES": str(64 << 20),
        },
    )  # fmt: skip


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def mesh(
    model: Path, expected: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Mesh]:
    async with Mesh(spec(model, 2), tmp_path_factory.mktemp("mesh")) as running:
        yield running


def content_of(pictures: Sequence[bytes], texts: Sequence[str]) -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = []
    for data in pictures:
        text = base64.b64encode(data).decode()
        url = {"url": f"data:image/{read_header(data).format};base64,{text}"}
        content.append({"type": "image_url", "image_url": url})
    return content + [{"type": "text", "text": text} for text in texts]


def body(texts: tuple[str, ...], images: tuple[int, ...], num_tokens: int) -> dict[str, Any]:
    content = content_of([picture(image) for image in images], texts)
    return {
        "model": "default", "messages": [{"role": "user", "content": content}],
        "max_tokens": num_tokens,
        "temperature": 0, "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip


@pytest.mark.req("S128")
async def test_chats_about_images_are_answered_as_by_plain_vllm(
    mesh: Mesh, expected: list[list[int]]
) -> None:
    async with httpx.AsyncClient(base_url=mesh.http_url, timeout=300) as client:
        for _ in range(2):
            bodies = [
                body(*chat, len(answer)) for chat, answer in zip(CHATS, expected, strict=True)
            ]
            work = (client.post("/v1/chat/completions", json=each) for each in bodies)
            for response, answer, (_, images) in zip(
                await asyncio.gather(*work), expected, CHATS, strict=True
            ):
                assert response.status_code == 200, response.text
                found = response.json()
                assert found["prompt_token_ids"].count(IMAGE) == len(images) * NUM_IMAGE_TOKENS
                assert found["choices"][0]["token_ids"] == answer
    samples = (s for name in DECODES for s in fleet.samples(mesh, name))
    assert sum(v for n, _, v in samples if n == "pdmesh_kv_computed_tokens_total") == 0


@pytest.mark.fault("F1")
@pytest.mark.req("S128")
async def test_an_answer_about_an_image_survives_its_decode(
    mesh: Mesh, expected: list[list[int]]
) -> None:
    """The prompt, its image and the drawn tokens are sent to the prefill again."""
    at = max(range(len(CHATS)), key=lambda chat: len(expected[chat]))
    answer = expected[at]
    assert len(answer) > 30
    tokens: list[int] = []
    victim = ""
    before = {name: drawn(mesh, name) for name in DECODES}
    async with (
        httpx.AsyncClient(base_url=mesh.http_url, timeout=300) as client,
        client.stream(
            "POST", "/v1/chat/completions", json=body(*CHATS[at], len(answer)) | {"stream": True}
        ) as response,
    ):
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line[6:])["choices"]:
                tokens += choice.get("token_ids") or []
            if len(tokens) > 10 and not victim:
                victim = max(DECODES, key=lambda name: drawn(mesh, name) - before[name])
                mesh.kill(victim)
    assert victim
    assert tokens == answer


def drawn(mesh: Mesh, name: str) -> float:
    return fleet.counted(mesh, [name], "pdmesh_instance_tokens_total")


@pytest.mark.fault("F1")
@pytest.mark.req("S130")
async def test_an_encoder_that_dies_at_work_changes_no_answer(
    model: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    """The encoder dies at the third image.

    Only the last chat has this image. The other chats share two images.
    """
    own = {"encoder-0": {"PDMESH_INSTANCE_FAILPOINT": "encode.computing=sigkill@3"}}
    wanted = replace(spec(model, 1), num_encoder=1, service_env=own)
    async with (
        Mesh(wanted, tmp_path) as mesh,
        httpx.AsyncClient(base_url=mesh.http_url, timeout=300) as client,
    ):
        await until_encoding(mesh)
        for chat, answer in zip(CHATS, expected, strict=True):
            response = await client.post("/v1/chat/completions", json=body(*chat, len(answer)))
            assert response.status_code == 200, response.text
            assert response.json()["choices"][0]["token_ids"] == answer
        assert images(mesh, "fetched") > 0
        num_images = sum(len(shown) for _, shown in CHATS)
        outcomes = ("fetched", "not_made", "late", "lost", "skipped")
        assert sum(images(mesh, outcome) for outcome in outcomes) == num_images
        metric = "pdmesh_gateway_images_encoded_prompts_total"
        assert fleet.counted(mesh, ["gateway-0"], metric, pdmesh_outcome="lost") == 1


def images(mesh: Mesh, outcome: str) -> float:
    metric = "pdmesh_images_awaited_total"
    return fleet.counted(mesh, ["prefill-0"], metric, pdmesh_outcome=outcome)
