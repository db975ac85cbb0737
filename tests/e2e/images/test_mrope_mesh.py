"""A vLLM mesh whose model has M-RoPE answers chats about images, also when a decode dies.

The images have several shapes. The answers must equal those of plain vLLM, which is vLLM without
the mesh.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from pdmesh.core.images.header import read_header
from pdmesh.launcher.mesh import Mesh
from tests.e2e.cases import Case
from tests.e2e.conftest import plain_vllm
from tests.e2e.images.test_engine import VISION, picture
from tests.e2e.images.test_mesh import DECODES, content_of, drawn, spec
from tests.e2e.images.test_mrope import FACTS, TRUSTING, turned
from tests.e2e.images.tiny_qwen2_vl import IMAGE, write_tiny_qwen2_vl
from tests.support.sites import fleet

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),  # vLLM emits warnings
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.req("S129"),
]
NUM_TOKENS = 200
# The second picture is as large as the first, with another number of rows. The third picture is
# shown on its side.
PICTURES = (picture(1, (42, 84)), picture(2, (84, 42)), turned(picture(3, (40, 90))))
CHATS = [("What is it?", (0,)), ("What is it?", (1,)), ("And?", (2, 0)), ("Say it.", ())]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen2_vl(tmp_path_factory.mktemp("models") / "qwen2-vl")


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """The answers of plain vLLM, each cut at its first near-tie.

    At a near-tie, two tokens are almost equally likely, so rounding may decide.
    """
    folder = tmp_path_factory.mktemp("pictures")
    for at, data in enumerate(PICTURES):
        (folder / str(at)).write_bytes(data)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    cases = []
    for text, images in CHATS:
        shown = "<|vision_start|><|image_pad|><|vision_end|>" * len(images)
        prompt = f"<s>user: {shown}{text}\nassistant: "
        ids = tokenizer.encode(prompt, add_special_tokens=False).ids
        paths = tuple(str(folder / str(at)) for at in images)
        cases.append(Case(tuple(ids), NUM_TOKENS, images=paths))
    with plain_vllm(model, cases, folder, **VISION, **TRUSTING) as plain:
        tokens = plain.decided(cases)[1]
    assert len({tuple(answer[:3]) for answer in tokens}) == len(CHATS)
    return tokens


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def mesh(
    model: Path, expected: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Mesh]:
    wanted = replace(spec(model, 2), engine_args=TRUSTING)
    async with Mesh(wanted, tmp_path_factory.mktemp("mesh")) as running:
        yield running


def body(text: str, images: tuple[int, ...], num_tokens: int) -> dict[str, Any]:
    content = content_of([PICTURES[at] for at in images], (text,))
    return {
        "model": "default", "messages": [{"role": "user", "content": content}],
        "max_tokens": num_tokens,
        "temperature": 0, "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip


async def test_chats_are_answered_as_by_plain_vllm(mesh: Mesh, expected: list[list[int]]) -> None:
    sizes = [read_header(data).shown_size for data in PICTURES]
    num_tokens = [FACTS.place_of(*size).num_tokens for size in sizes]
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
                assert found["choices"][0]["token_ids"] == answer
                num = found["prompt_token_ids"].count(IMAGE)
                assert num == sum(num_tokens[at] for at in images)
    samples = (s for name in DECODES for s in fleet.samples(mesh, name))
    assert sum(v for n, _, v in samples if n == "pdmesh_kv_computed_tokens_total") == 0


@pytest.mark.fault("F1")
async def test_an_answer_survives_its_decode(mesh: Mesh, expected: list[list[int]]) -> None:
    """The prefill gets the drawn tokens after the images. Then the other decode continues."""
    at = max(range(3), key=lambda chat: len(expected[chat]))
    answer = expected[at]
    assert len(answer) > 30
    tokens: list[int] = []
    victim = ""
    before = {name: drawn(mesh, name) for name in DECODES}
    asked = body(*CHATS[at], len(answer)) | {"stream": True}
    async with (
        httpx.AsyncClient(base_url=mesh.http_url, timeout=300) as client,
        client.stream("POST", "/v1/chat/completions", json=asked) as response,
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
