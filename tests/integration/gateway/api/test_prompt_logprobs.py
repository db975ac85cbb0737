"""Tests the log probabilities of prompt tokens, and the field that tells why an answer stopped.
Both must have vLLM's form, even after a decode dies.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import httpx
import pytest

from pdmesh.v1 import inference_service_pb2 as pb
from pdmesh.v1.common_pb2 import ROLE_DECODE, ROLE_PREFILL
from pdmesh.v1.inference_service_pb2_grpc import InferenceServiceStub
from tests.fakes.fake_instance import FakeInstance
from tests.fakes.gateway_mesh import GatewayMesh, gateway_mesh
from tests.fakes.tiny_model import EOS

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[GatewayMesh]:
    async with gateway_mesh(tmp_path_factory.getbasetemp(), 0, 0) as mesh:
        for role, name in (
            (ROLE_PREFILL, "prefill-0"),
            (ROLE_PREFILL, "prefill-1"),
            (ROLE_DECODE, "decode-0"),
            (ROLE_DECODE, "decode-1"),
        ):
            await mesh.add(FakeInstance(role, name, supports_logprobs=True))
        yield mesh


@pytest.fixture
async def http(mesh: GatewayMesh) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=mesh.url, timeout=60) as http:
        yield http


async def answer(http: httpx.AsyncClient, **body: Any) -> Any:
    path = "chat/completions" if "messages" in body else "completions"
    found = await http.post(f"/v1/{path}", json={"model": "tiny", **body})
    assert found.status_code == 200, found.text
    return found.json()


async def refusal(http: httpx.AsyncClient, **body: Any) -> Any:
    found = await http.post("/v1/completions", json={"model": "tiny", "prompt": "abc", **body})
    assert found.status_code == 400, found.text
    return found.json()["error"]["param"]


async def events(http: httpx.AsyncClient, **body: Any) -> list[Any]:
    found = await http.post("/v1/completions", json={"model": "tiny", "stream": True, **body})
    assert found.status_code == 200, found.text
    lines = [line.removeprefix("data: ") for line in found.text.splitlines() if line]
    return [httpx.Response(200, text=line).json() for line in lines if line != "[DONE]"]


async def ids_of(mesh: GatewayMesh, text: str) -> list[int]:
    return list(await mesh.tokenizer.encode(text, add_special_tokens=True))


async def test_each_token_of_a_prompt_but_the_first_has_logprobs(
    mesh: GatewayMesh, http: httpx.AsyncClient
) -> None:
    """The prompt's own token comes first in each entry, under its id. The most likely tokens follow
    with ranks from 1 on.
    """
    ids = await ids_of(mesh, "abc")
    (choice,) = (await answer(http, prompt="abc", max_tokens=3, prompt_logprobs=2))["choices"]
    first, *others = choice["prompt_logprobs"]
    assert first is None
    assert [next(iter(each)) for each in others] == [str(token_id) for token_id in ids[1:]]
    assert others[0][str(ids[1])] == {"logprob": -1.0, "rank": 1, "decoded_token": "b"}
    assert others[1]["1"]["rank"] == 2
    assert choice["text"] == mesh.expected_text("abc", 3)
    chat = await answer(http, messages=HELLO, max_tokens=3, prompt_logprobs=0)
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


@pytest.mark.fault("F7")
async def test_prompt_logprobs_are_computed_once_even_after_a_death(
    mesh: GatewayMesh, http: httpx.AsyncClient
) -> None:
    for decode in (i for i in mesh.instances.values() if i.role == ROLE_DECODE):
        decode.breaks_at = 4
    (choice,) = (await answer(http, prompt="abc", max_tokens=12, prompt_logprobs=1))["choices"]
    assert choice["text"] == mesh.expected_text("abc", 12)
    assert len(choice["prompt_logprobs"]) == 3
    told = [leg.sampling for i in mesh.instances.values() for leg in i.prefills]
    told += [leg.sampling for i in mesh.instances.values() for leg in i.starts]
    asked = [sampling.HasField("num_prompt_logprobs") for sampling in told]
    assert sum(asked) == 1
    assert len(asked) >= 4, "two of the legs were started after a death"


async def test_a_replaced_prefill_still_gives_the_prompt_logprobs(
    mesh: GatewayMesh, http: httpx.AsyncClient
) -> None:
    for instance in mesh.instances.values():
        instance.reject_with = 1 if instance.instance_id == "prefill-0" else None
    (choice,) = (await answer(http, prompt="abc", max_tokens=2, prompt_logprobs=1))["choices"]
    assert len(choice["prompt_logprobs"]) == 3


@pytest.mark.parametrize("n", [1, 2])
async def test_an_echo_has_the_prompt_logprobs_before_those_of_the_answer(
    mesh: GatewayMesh, http: httpx.AsyncClient, n: int
) -> None:
    """The test compares the whole and the streamed answer. Offsets count from the beginning of the
    prompt.
    """
    asked = {"prompt": "ab\u00e9", "max_tokens": 3, "echo": True, "logprobs": 1, "n": n}
    ids = await ids_of(mesh, "ab\u00e9")
    text = "ab\u00e9" + mesh.expected_text("ab\u00e9", 3)
    whole = (await answer(http, **asked))["choices"]
    streamed = await events(http, **asked)
    for index in range(n):
        found = whole[index]["logprobs"]
        assert whole[index]["text"] == text
        assert found["token_logprobs"][: len(ids)] == [None, -1.0, -2.0, -3.0]
        assert found["top_logprobs"][0] is None
        assert found["tokens"][2:4] == ["bytes:\\xc3", "bytes:\\xa9"]
        assert found["text_offset"] == [0, 1, 2, 2, 3, 4, 5]
        pieces = [c for e in streamed for c in e["choices"] if c["index"] == index]
        assert "".join(piece["text"] for piece in pieces) == text
        for name, values in found.items():
            joined = [v for p in pieces if p["logprobs"] for v in p["logprobs"][name]]
            assert joined == values, name


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_without_an_answer_is_only_the_prompt(
    mesh: GatewayMesh, http: httpx.AsyncClient, stream: bool
) -> None:
    for logprobs in (None, 1):
        asked = {"prompt": "abc", "max_tokens": 0, "echo": True, "logprobs": logprobs}
        if stream:
            choices = [c for e in await events(http, **asked) for c in e["choices"]]
        else:
            choices = (await answer(http, **asked))["choices"]
        assert "".join(choice["text"] for choice in choices) == "abc"
        assert choices[-1]["finish_reason"] == "length"
        told = [t for c in choices if c["logprobs"] for t in c["logprobs"]["tokens"]]
        assert told == (["a", "b", "c"] if logprobs else [])


async def test_the_refusal_of_prompt_logprobs_that_are_not_available_names_the_field(
    mesh: GatewayMesh, http: httpx.AsyncClient
) -> None:
    assert await refusal(http, prompt_logprobs=21) == "prompt_logprobs"
    assert await refusal(http, prompt_logprobs=-1) == "prompt_logprobs"
    assert await refusal(http, prompt_logprobs=1, stream=True) == "prompt_logprobs"
    assert await refusal(http, prompt=[7] * 4000, prompt_logprobs=20, n=8) == "prompt_logprobs"
    assert await refusal(http, max_tokens=0) == "max_tokens"
    for instance in mesh.instances.values():
        instance.supports_logprobs = False
        mesh.register(instance.record())
    assert await refusal(http, prompt_logprobs=0) == "prompt_logprobs"
    assert await refusal(http, echo=True, logprobs=0) == "logprobs"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_says_what_stopped_it(
    mesh: GatewayMesh, http: httpx.AsyncClient, stream: bool
) -> None:
    """`stop_reason` is the stop string or stop token. It is null if the model itself ended the
    answer, or if the answer reached `max_tokens`.
    """
    whole = mesh.expected_text("abc", 40)
    (stop_id,) = await mesh.tokenizer.encode(whole[20], add_special_tokens=False)
    at = whole.index(whole[20])
    for asked, reason, stop_reason in (
        ({"stop": ["\u00e9", whole[8:11]]}, "stop", whole[8:11]),
        ({"stop_token_ids": [stop_id], "min_tokens": 0}, "stop", stop_id),
        ({"max_tokens": at}, "length", None),
    ):
        body = {"prompt": "abc", "max_tokens": 40, **asked}
        if stream:
            choices = [c for e in await events(http, **body) for c in e["choices"]]
            assert all("stop_reason" not in choice for choice in choices[:-1])
        else:
            choices = (await answer(http, **body))["choices"]
        assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == (reason, stop_reason)


async def test_the_models_own_end_token_is_a_stop_reason_only_on_request(
    mesh: GatewayMesh, http: httpx.AsyncClient
) -> None:
    assert mesh.tokenizer.eos_token_id == EOS
    end = mesh.expected_text("abc", 9)[5]
    (end_id,) = await mesh.tokenizer.encode(end, add_special_tokens=False)
    mesh.tokenizer.eos_token_id = end_id
    mesh.tokenizer.eos_token_ids = frozenset({end_id, EOS})
    (choice,) = (await answer(http, prompt="abc", max_tokens=9))["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
    asked = {"ignore_eos": True, "stop_token_ids": [end_id]}
    (choice,) = (await answer(http, prompt="abc", max_tokens=9, **asked))["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", end_id)


async def test_grpc_has_prompt_logprobs_and_stop_reasons(
    mesh: GatewayMesh, http: httpx.AsyncClient
) -> None:
    stop = mesh.expected_text("abc", 12)[8:11]
    params = pb.GenerationParams(max_tokens=12, num_prompt_logprobs=1, stop=[stop])
    request = pb.GenerateRequest(model="tiny", text="abc", params=params)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{mesh.gateway.grpc.port}") as channel:
        stub = InferenceServiceStub(channel)
        whole = await stub.Generate(request)
        assert whole.stop_reason.text == stop
        assert list(whole.prompt_logprobs.ranks) == [1, 2]
        parts = [p async for p in stub.GenerateStream(pb.GenerateStreamRequest(request=request))]
        assert [p.HasField("prompt_logprobs") for p in parts] == [
            True, *[False] * (len(parts) - 1)
        ]  # fmt: skip
        assert parts[-1].stop_reason.text == stop
        request.params.num_prompt_logprobs = 21
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(request)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
