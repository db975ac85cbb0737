"""Sends images through a whole mesh of simulated engines, by all APIs.

Each answer must be about its own images. Prompts may share KV only up to an image that differs. A
request must keep its images when its decode dies.
"""

from __future__ import annotations

import asyncio
import base64
import json
from array import array
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio

from pdmesh.core.images.prompt_image import PromptImage, digest_of
from pdmesh.engine.base import Sampling
from pdmesh.engine.sim.model import tokens_of
from pdmesh.engine.sim.vocabulary import IMAGE_ID
from pdmesh.launcher.mesh import Mesh
from pdmesh.launcher.spec import MeshSpec
from pdmesh.v1 import inference_service_pb2 as pb
from pdmesh.v1.inference_service_pb2_grpc import InferenceServiceStub
from tests.support.images.files import bomb, data_uri, gif, png
from tests.support.sim_reference import sim_reference
from tests.support.sites import fleet
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

IMAGE_TOKENS = 70  # more tokens than a block has
ENV = {
    "PDMESH_SIM_IMAGE_TOKENS": str(IMAGE_TOKENS),
    "PDMESH_PREFILL_KV_HOST_POOL_BYTES": str(4 << 20),
    "PDMESH_GATEWAY_MAX_IMAGE_BYTES": "100000",
    "PDMESH_GATEWAY_MAX_IMAGES": "3",
    "PDMESH_GATEWAY_TTFT_S": "60",
}
TEXT = "What is this? " * 6
NUM_TOKENS = 12
DECODES = ("decode-0", "decode-1")


def spec(env: dict[str, str], num_decode: int = 1) -> MeshSpec:
    return MeshSpec(
        engine="sim", num_prefill=1, num_decode=num_decode, http_port=0, grpc_port=0, env=env
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    async with Mesh(spec(ENV, num_decode=2), tmp_path_factory.mktemp("images")) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(mesh: Mesh) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=mesh.http_url, timeout=120) as client:
        yield client


def image_url(data: bytes) -> dict[str, Any]:
    return {"image_url": {"url": data_uri(data), "detail": "auto"}}


def part(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", **image_url(data)}


def chat(*parts: object, max_tokens: int = NUM_TOKENS, **fields: object) -> dict[str, Any]:
    content = [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]
    return {
        "model": "sim", "messages": [{"role": "user", "content": content}], "temperature": 0,
        "max_tokens": max_tokens, "ignore_eos": True, "return_token_ids": True, **fields,
    }  # fmt: skip


async def asked(client: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text[:500]
    found: dict[str, Any] = response.json()
    return found


def drawn(answer: dict[str, Any]) -> list[int]:
    tokens: list[int] = answer["choices"][0]["token_ids"]
    return tokens


def right(answer: dict[str, Any], *files: bytes) -> list[int]:
    """The tokens that a single engine draws for the answer's prompt with these images."""
    prompt = array("I", answer["prompt_token_ids"])
    images = []
    at = 0
    for data in files:
        at = prompt.index(IMAGE_ID, at)
        images.append(PromptImage(at, IMAGE_TOKENS, digest_of(data)))
        at += IMAGE_TOKENS
    assert prompt.count(IMAGE_ID) == len(files) * IMAGE_TOKENS
    assert len(prompt) == answer["usage"]["prompt_tokens"]
    seen = tokens_of(prompt, images).tolist()
    num = len(drawn(answer))
    return sim_reference(seen, Sampling(num, ignore_eos=True))[0]


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.req("S128")
async def test_each_answer_is_about_its_own_images(client: httpx.AsyncClient) -> None:
    cases = [(png(1),), (png(2),), (png(1), png(2)), (png(2), png(1)), (gif(),), ()]
    bodies = [chat(TEXT, *map(part, files), "And why?") for files in cases]
    answers = await asyncio.gather(*(asked(client, body) for body in bodies))
    for files, answer in zip(cases, answers, strict=True):
        assert drawn(answer) == right(answer, *files)
    assert len({tuple(drawn(answer)) for answer in answers}) == len(cases)


@pytest.mark.req("S80", "S128")
async def test_kv_is_shared_up_to_an_image_that_differs(client: httpx.AsyncClient) -> None:
    """The earlier message fills blocks of its own, because the template puts the images of a
    message before its text. Many templates do the same.
    """
    earlier = {"role": "user", "content": "long " * 200}

    async def ask(seed: int) -> dict[str, Any]:
        body = chat(part(png(seed)), cache_salt="shared")
        body["messages"].insert(0, earlier)
        answer = await asked(client, body)
        assert drawn(answer) == right(answer, png(seed))
        return answer

    first, again = await ask(11), await ask(11)
    assert cached(first) == 0
    assert cached(again) == (first["usage"]["prompt_tokens"] - 1) // 64 * 64
    begins = first["prompt_token_ids"].index(IMAGE_ID) // 64 * 64
    assert 0 < cached(await ask(12)) <= begins


@pytest.mark.req("S128")
async def test_all_apis_give_the_same_answer(mesh: Mesh, client: httpx.AsyncClient) -> None:
    data = png(21)
    expected = (await asked(client, chat(TEXT, part(data))))["choices"][0]["message"]["content"]
    encoded = base64.b64encode(data).decode()
    source = {"type": "base64", "media_type": "image/png", "data": encoded}
    blocks = [{"type": "text", "text": TEXT}, {"type": "image", "source": source}]
    answer = await client.post("/v1/messages", json={
        "model": "sim", "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True,
        "messages": [{"role": "user", "content": blocks}],
    })  # fmt: skip
    assert answer.json()["content"][0]["text"] == expected
    items = [{"type": "input_text", "text": TEXT},
             {"type": "input_image", "image_url": data_uri(data), "detail": "low"}]  # fmt: skip
    answer = await client.post("/v1/responses", json={
        "model": "sim", "max_output_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True,
        "input": [{"role": "user", "content": items}], "store": False,
    })  # fmt: skip
    assert answer.json()["output"][0]["content"][0]["text"] == expected
    async with grpc.aio.insecure_channel(mesh.grpc_address) as channel:
        for kind in ({"image": data}, {"image_url": data_uri(data)}):
            parts = [pb.ContentPart(text=TEXT), pb.ContentPart(**kind)]
            request = pb.ChatRequest(
                model="sim",
                messages=[pb.ChatMessage(role="user", content_parts=parts)],
                params=pb.GenerationParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True),
            )
            response = await InferenceServiceStub(channel).Chat(request)
            assert response.message.content == expected


@pytest.mark.req("S128")
async def test_tokenize_counts_the_tokens_of_images(client: httpx.AsyncClient) -> None:
    body = chat(TEXT, part(png(1)))
    answer = await asked(client, body)
    told = await client.post("/tokenize", json={"model": "sim", "messages": body["messages"]})
    assert told.json()["tokens"] == answer["prompt_token_ids"]
    encoded = base64.b64encode(png(1)).decode()
    source = {"type": "base64", "media_type": "image/png", "data": encoded}
    blocks = [{"type": "text", "text": TEXT}, {"type": "image", "source": source}]
    messages = [{"role": "user", "content": blocks}]
    counted = {"model": "sim", "messages": messages}
    told = await client.post("/v1/messages/count_tokens", json=counted)
    assert told.json()["input_tokens"] == len(answer["prompt_token_ids"])


BAD: list[tuple[list[object], str, str]] = [
    ([part(b"x")], "messages[0].content[0].image_url.url", "no PNG"),
    (["a", part(bomb())], "messages[0].content[1].image_url.url", "pixels"),
    ([part(png(1) + bytes(100_000))], "messages[0].content[0].image_url.url", "100000 bytes"),
    ([part(png(1) + bytes(60_000)), part(png(2) + bytes(60_000))],
     "messages[0].content[1].image_url.url", "100000 bytes"),
    ([part(png(n)) for n in range(4)], "messages[0].content[3].image_url.url", "at most 3"),
    ([{"type": "image_url"}], "messages[0].content[0].image_url", "missing"),
    ([{"type": "image_url", "image_url": {}}], "messages[0].content[0].image_url.url", "missing"),
    ([{"type": "image_url", "image_url": {"url": "data:image/png,x"}}],
     "messages[0].content[0].image_url.url", "base64"),
    ([{"type": "image_url", "image_url": {"url": "http://127.0.0.1/"}}],
     "messages[0].content[0].image_url.url", "operator"),
    ([part(png(1)) | {"text": "a"}], "messages[0].content[0].text", "not supported"),
    ([{"type": "text", "text": "a", **image_url(png(1))}], "messages[0].content[0].image_url",
     "not supported"),
    ([{"type": "image_url", "image_url": {"url": data_uri(png(1)), "detail": "huge"}}],
     "messages[0].content[0].image_url.detail", "huge"),
    ([{"type": "image_url", "image_url": 1}], "messages[0].content[0].image_url", "expected"),
    (["<|endoftext|>", part(png(1))], "messages", "places for them"),
]  # fmt: skip


@pytest.mark.req("S128")
@pytest.mark.parametrize(("parts", "field", "says"), BAD)
async def test_a_bad_image_is_refused_with_its_field(
    client: httpx.AsyncClient, parts: list[object], field: str, says: str
) -> None:
    response = await client.post("/v1/chat/completions", json=chat(*parts))
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, field), error
    assert says in error["message"]
    assert len(response.content) < 2000


async def test_unknown_fields_of_an_image_are_ignored_and_named(client: httpx.AsyncClient) -> None:
    url = {"url": data_uri(png(1)), "size": 1}
    body = chat({"type": "image_url", "image_url": url})
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200
    named = response.headers["x-pdmesh-ignored"]
    assert named == "messages[0].content[0].image_url.size"


@pytest.mark.req("S128")
async def test_an_image_of_another_media_type_is_refused(client: httpx.AsyncClient) -> None:
    """Anthropic's API refuses it, too."""
    for said, status in (("png", 200), ("jpeg", 400)):
        encoded = base64.b64encode(png(1)).decode()
        source = {"type": "base64", "media_type": f"image/{said}", "data": encoded}
        messages = [{"role": "user", "content": [{"type": "image", "source": source}]}]
        body = {"model": "sim", "messages": messages, "max_tokens": 2}
        response = await client.post("/v1/messages", json=body)
        assert response.status_code == status, response.text
    message = response.json()["error"]["message"]
    assert message == "messages[0].content[0].source.media_type: the image is a png image, not jpeg"


@pytest.mark.req("S128")
@pytest.mark.parametrize("api", ["messages", "responses", "grpc"])
async def test_every_api_names_its_own_field(
    mesh: Mesh, client: httpx.AsyncClient, api: str
) -> None:
    encoded = base64.b64encode(b"x").decode()
    if api == "grpc":
        parts = [pb.ContentPart(text="a"), pb.ContentPart(image=b"x")]
        request = pb.ChatRequest(
            model="sim", messages=[pb.ChatMessage(role="user", content_parts=parts)]
        )
        async with grpc.aio.insecure_channel(mesh.grpc_address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await InferenceServiceStub(channel).Chat(request)
        assert "messages[0].content_parts[1].image" in (refused.value.details() or "")
        return
    content: list[dict[str, Any]]
    if api == "messages":
        source = {"type": "base64", "media_type": "image/png", "data": encoded}
        content = [{"type": "text", "text": ""}, {"type": "image", "source": source}]
        body, field = {"max_tokens": 5}, "messages[0].content[1].source.data"
    else:
        content = [{"type": "input_text", "text": "a"},
                   {"type": "input_image", "image_url": data_uri(b"x")}]  # fmt: skip
        body, field = {}, "input[0].content[1].image_url"
    messages = [{"role": "user", "content": content}]
    name = "input" if api == "responses" else "messages"
    response = await client.post(f"/v1/{api}", json={"model": "sim", name: messages, **body})
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(f"{field}: ")


@pytest.mark.req("S128")
async def test_choices_of_a_call_with_a_large_image_answer_alike(client: httpx.AsyncClient) -> None:
    large = png(1) + bytes(90_000)
    response = await client.post("/v1/chat/completions", json=chat(part(large), n=2))
    assert response.status_code == 200
    assert len({tuple(c["token_ids"]) for c in response.json()["choices"]}) == 1


@pytest.mark.fault("F1")
@pytest.mark.req("S128")
async def test_an_answer_goes_on_about_its_image_when_its_decode_is_killed(
    mesh: Mesh, client: httpx.AsyncClient
) -> None:
    """The prefill computes the image again, and the other decode gets the KV from the prefill."""
    data, num = png(31), 400
    body = chat(TEXT, part(data), max_tokens=num, stream=True)
    tokens: list[int] = []
    prompt: list[int] = []
    victim = ""
    before = {name: _num_drawn(mesh, name) for name in DECODES}
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            prompt = prompt or chunk.get("prompt_token_ids") or []
            for choice in chunk["choices"]:
                tokens += choice.get("token_ids") or []
            if len(tokens) > 20 and not victim:
                victim = max(DECODES, key=lambda n: _num_drawn(mesh, n) - before[n])
                mesh.kill(victim)
    answer = {
        "prompt_token_ids": prompt,
        "usage": {"prompt_tokens": len(prompt)},
        "choices": [{"token_ids": tokens}],
    }
    assert len(tokens) == num
    assert tokens == right(answer, data)


def _num_drawn(mesh: Mesh, name: str) -> float:
    return fleet.counted(mesh, [name], "pdmesh_instance_tokens_total")


@pytest.mark.req("S128")
async def test_no_image_is_held_when_its_request_is_over(
    mesh: Mesh, client: httpx.AsyncClient
) -> None:
    await asked(client, chat(part(png(41))))
    await until(lambda: fleet.counted(mesh, ["gateway-0"], "pdmesh_gateway_images_held_bytes") == 0)


@pytest.mark.req("S48", "S128")
@pytest.mark.parametrize("kind", ["per layer", "fusion"])
async def test_images_are_computed_per_layer_and_on_fusion_instances(
    tmp_path: Path, kind: str
) -> None:
    per_layer = {"PDMESH_KV_TRANSFER": "per_layer"} if kind == "per layer" else {}
    wanted = spec(ENV | per_layer)
    if kind == "fusion":
        wanted = replace(wanted, num_prefill=0, num_decode=0, num_fusion=1)
    async with (
        Mesh(wanted, tmp_path) as mesh,
        httpx.AsyncClient(base_url=mesh.http_url, timeout=60) as client,
    ):
        for files in ((png(51),), (png(52),), (png(51), png(52)), ()):
            answer = await asked(client, chat(TEXT * 3, *map(part, files), max_tokens=100))
            assert drawn(answer) == right(answer, *files)
        if kind == "per layer":
            layers = fleet.counted(mesh, ["decode-0"], "pdmesh_kv_transfer_bytes_total")
            assert layers > 0


async def test_a_model_without_images_refuses_them(tmp_path: Path) -> None:
    async with (
        Mesh(spec({}), tmp_path) as mesh,
        httpx.AsyncClient(base_url=mesh.http_url, timeout=60) as client,
    ):
        response = await client.post("/v1/chat/completions", json=chat("a", part(png(1))))
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "messages[0].content[1]")
        assert "takes no images" in error["message"]
