"""Tests vLLM's sampling parameters. The gateway must send them with each leg, which is a request's
stay on one instance, and they must affect the text.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
from google.protobuf.json_format import MessageToDict
from openai.types import Completion

from pdmesh.errors import InvalidRequest
from pdmesh.instance.legs.convert import sampling_from_proto
from pdmesh.services.gateway.request.bounds import MAX_ALLOWED_IDS, check_allowed_ids
from pdmesh.v1 import inference_service_pb2 as pb
from pdmesh.v1.common_pb2 import FINISH_REASON_REPETITION, ROLE_DECODE
from pdmesh.v1.inference_service_pb2_grpc import InferenceServiceStub
from tests.fakes.gateway_mesh import GatewayMesh, gateway_mesh
from tests.fakes.tiny_model import EOS
from tests.support.waiting import until

SHAPING: dict[str, Any] = {
    "presence_penalty": 0.5,
    "frequency_penalty": -0.25,
    "repetition_penalty": 1.5,
    "top_k": 7,
    "min_p": 0.125,
    "min_tokens": 3,
    "logit_bias": {"5": -100, "6": 2.5},
    "bad_words": ["xy"],
    "allowed_token_ids": [1, 2, 3],
}


def sent(mesh: GatewayMesh) -> list[dict[str, Any]]:
    """The logit shaping that the gateway sent with each leg."""
    instances = mesh.instances.values()
    told = [leg.sampling for i in instances for leg in i.prefills]
    told += [leg.sampling for i in instances for leg in i.starts]
    return [MessageToDict(sampling.shaping) for sampling in told if sampling.HasField("shaping")]


@pytest.mark.fault("F7")
async def test_each_leg_gets_all_parameters_even_after_a_death(
    mesh: GatewayMesh, client: openai.AsyncOpenAI
) -> None:
    for decode in (i for i in mesh.instances.values() if i.role == ROLE_DECODE):
        decode.breaks_at = 4
    answer = await client.completions.create(
        model="tiny", prompt="abc", max_tokens=12, extra_body=SHAPING
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    legs = sent(mesh)
    assert len(legs) >= 4, "two of them came after a death"
    assert all(leg == legs[0] for leg in legs)
    told = legs[0]
    assert told["logitBias"] == {"5": -100.0, "6": 2.5}
    assert (told["topK"], told["minTokens"], told["allowedTokenIds"]) == (7, 3, [1, 2, 3])
    ids = await mesh.tokenizer.encode("xy", add_special_tokens=False)
    assert told["badWords"] == [{"tokenIds": list(ids)}]
    assert (told["presencePenalty"], told["frequencyPenalty"]) == (0.5, -0.25)
    assert (told["repetitionPenalty"], told["minP"]) == (1.5, 0.125)


async def test_grpc_has_the_same_parameters(mesh: GatewayMesh, client: openai.AsyncOpenAI) -> None:
    await client.completions.create(model="tiny", prompt="abc", max_tokens=5, extra_body=SHAPING)
    params = pb.GenerationParams(
        max_tokens=5,
        presence_penalty=0.5,
        frequency_penalty=-0.25,
        repetition_penalty=1.5,
        top_k=7,
        min_p=0.125,
        min_tokens=3,
        logit_bias={5: -1000.0, 6: 2.5},
        bad_words=["xy"],
        allowed_token_ids=[1, 2, 3],
    )
    async with grpc.aio.insecure_channel(f"127.0.0.1:{mesh.gateway.grpc.port}") as channel:
        stub = InferenceServiceStub(channel)
        await stub.Generate(pb.GenerateRequest(model="tiny", text="abc", params=params))
        legs = sent(mesh)
        assert len(legs) == 4
        assert all(leg == legs[0] for leg in legs)
        params.bad_words.append("")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(pb.GenerateRequest(model="tiny", text="abc", params=params))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_request_without_parameters_carries_none(
    mesh: GatewayMesh, client: openai.AsyncOpenAI
) -> None:
    await client.completions.create(model="tiny", prompt="abc", max_tokens=4)
    assert sent(mesh) == []


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_token_ends_the_text_before_it_or_after_it(
    mesh: GatewayMesh, client: openai.AsyncOpenAI, stream: bool
) -> None:
    """A requested stop token still works when the client ignores the model's own stop tokens."""
    whole = mesh.expected_text("abc", 60)
    end = whole[20]
    (stop_id,) = await mesh.tokenizer.encode(end, add_special_tokens=False)
    asked = {"stop_token_ids": [stop_id], "ignore_eos": True}
    for is_shown, expected in ((False, whole.index(end)), (True, whole.index(end) + 1)):
        text, reason = await whole_text(
            client, stream, extra_body=asked | {"include_stop_str_in_output": is_shown}
        )
        assert text == whole[:expected]
        assert reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_is_shown_and_waits_for_min_tokens(
    mesh: GatewayMesh, client: openai.AsyncOpenAI, stream: bool
) -> None:
    whole = mesh.expected_text("abc", 60)
    stop = whole[20:22]
    begin = whole.index(stop)
    shown, _ = await whole_text(
        client, stream, stop=stop, extra_body={"include_stop_str_in_output": True}
    )
    assert shown == whole[: begin + 2]
    later, _ = await whole_text(client, stream, stop=stop, extra_body={"min_tokens": begin + 2})
    again = whole.find(stop, begin + 1)
    assert later == (whole if again < 0 else whole[:again])


async def whole_text(
    client: openai.AsyncOpenAI, stream: bool, **asked: Any
) -> tuple[str, str | None]:
    answer = await client.completions.create(
        model="tiny", prompt="abc", max_tokens=60, stream=stream, **asked
    )
    if isinstance(answer, Completion):
        return answer.choices[0].text, answer.choices[0].finish_reason
    text, reason = "", None
    async for chunk in answer:
        text += chunk.choices[0].text
        reason = chunk.choices[0].finish_reason or reason
    return text, reason


@pytest.mark.fault("F7")
async def test_each_leg_gets_the_token_ids_whose_logprobs_are_wanted(
    mesh: GatewayMesh, client: openai.AsyncOpenAI
) -> None:
    for instance in mesh.instances.values():
        instance.breaks_at = 4 if instance.role == ROLE_DECODE else None
        record = instance.record()
        record.supports_logprobs = True
        mesh.register(record)
    await asyncio.sleep(0)
    asked = {"logprob_token_ids": [3, 1]}
    await client.completions.create(
        model="tiny", prompt="abc", max_tokens=12, logprobs=0, extra_body=asked
    )
    legs = [leg.sampling for i in mesh.instances.values() for leg in i.prefills]
    legs += [leg.sampling for i in mesh.instances.values() for leg in i.starts]
    assert len(legs) >= 4, "two of them came after a death"
    assert {tuple(leg.logprob_token_ids) for leg in legs} == {(3, 1)}
    for wrong in ({"logprobs": 1, "extra_body": {"logprob_token_ids": [1 << 20]}},
                  {"logprobs": 1, "extra_body": {"logprob_token_ids": [1] * 129}},
                  {"extra_body": asked}):  # fmt: skip
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(model="tiny", prompt="abc", max_tokens=4, **wrong)
        assert caught.value.param == "logprob_token_ids"


async def test_allowed_tokens_are_counted_once_and_over_all_choices(
    mesh: GatewayMesh, client: openai.AsyncOpenAI
) -> None:
    """Equal ids count once. The gateway sends the list for each choice, so all choices count."""
    for instance in mesh.instances.values():
        instance.script, instance.breaks_at = (), None
        instance.prefills.clear()
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 2, "n": 16}
    prompts = ["a", "b"]
    await client.completions.create(
        **asked, prompt=prompts, extra_body={"allowed_token_ids": [5, 6] * 30_000}
    )
    legs = [prefill for i in mesh.instances.values() for prefill in i.prefills]
    assert {tuple(leg.sampling.shaping.allowed_token_ids) for leg in legs} == {(5, 6)}


def test_the_number_of_allowed_tokens_of_a_call_is_bounded() -> None:
    check_allowed_ids(MAX_ALLOWED_IDS // 16, 16)
    with pytest.raises(InvalidRequest) as caught:
        check_allowed_ids(MAX_ALLOWED_IDS // 16 + 1, 16)
    assert caught.value.field == "allowed_token_ids"


async def test_tiny_values_do_not_become_zero_on_the_way_to_an_instance(
    mesh: GatewayMesh, client: openai.AsyncOpenAI
) -> None:
    """An instance gets numbers of 32 bits and refuses a zero for these fields."""
    for instance in mesh.instances.values():
        instance.script, instance.breaks_at = (), None
        instance.prefills.clear()
    asked = {"repetition_penalty": 1e-50}
    await client.completions.create(
        model="tiny", prompt="abc", max_tokens=2, top_p=1e-50, extra_body=asked
    )
    (leg,) = (prefill for i in mesh.instances.values() for prefill in i.prefills)
    found = sampling_from_proto(leg.sampling)
    assert 0 < found.top_p < 1e-30
    assert 0 < found.shaping.repetition_penalty < 1e-30


REPEATED: dict[str, Any] = {
    "repetition_detection": {"max_pattern_size": 5, "min_pattern_size": 2, "min_count": 3}
}


def repeats_itself(mesh: GatewayMesh, text: str) -> None:
    """Make all instances write `text`, and make each decode die at its third token."""
    script = [*mesh.tokenizer._encode(text, add_special_tokens=False), EOS]
    for instance in mesh.instances.values():
        instance.script = script
        instance.breaks_at = 3 if instance.role == ROLE_DECODE else None


@pytest.mark.fault("F7")
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_repeats_itself_ends_there_through_a_death(
    mesh: GatewayMesh, client: openai.AsyncOpenAI, stream: bool
) -> None:
    repeats_itself(mesh, "aaaa abcabcabcabcabc")
    found = await whole_text(client, stream, extra_body=REPEATED)
    assert found == ("aaaa abcabcabc", "repetition")
    repeats_itself(mesh, "aaaa abcabcabcabcabc")
    asked = REPEATED | {"min_tokens": 16}
    assert await whole_text(client, stream, extra_body=asked) == ("aaaa abcabcabcab", "repetition")
    repeats_itself(mesh, "aaaa abcabcabc")
    found = await whole_text(client, stream, stop="cabc", extra_body=REPEATED)
    assert found == ("aaaa ab", "stop"), "the stop string is complete at the same token or before"
    repeats_itself(mesh, "aaaa abcabcab")
    assert await whole_text(client, stream, extra_body=REPEATED) == ("aaaa abcabcab", "stop")


async def test_the_reported_repetition_is_the_one_that_counts(mesh: GatewayMesh) -> None:
    repeats_itself(mesh, "xyxyxyxyxy")
    body = {"model": "tiny", "prompt": "abc", "max_tokens": 10, "return_token_ids": True}
    async with httpx.AsyncClient(timeout=30) as http:
        answer = (await http.post(f"{mesh.url}/v1/completions", json=body | REPEATED)).json()
    (choice,) = answer["choices"]
    assert (choice["stop_reason"], len(choice["token_ids"])) == ("repetition_detected", 6)
    assert answer["usage"]["completion_tokens"] == 6
    repeats_itself(mesh, "xyxyxyxyxy")
    params = pb.GenerationParams(max_tokens=10)
    params.repetition_detection.max_pattern_size = params.repetition_detection.min_count = 3
    async with grpc.aio.insecure_channel(f"127.0.0.1:{mesh.gateway.grpc.port}") as channel:
        stub = InferenceServiceStub(channel)
        told = await stub.Generate(pb.GenerateRequest(model="tiny", text="abc", params=params))
    assert (told.text, told.finish_reason) == ("xyxyxy", FINISH_REASON_REPETITION)
    assert not told.HasField("stop_reason")


async def test_a_repetition_ends_the_work_on_a_whole_answer(
    mesh: GatewayMesh, client: openai.AsyncOpenAI
) -> None:
    """The instance itself does not look for repetitions and would draw all tokens. The gateway must
    abort the leg.
    """
    for instance in mesh.instances.values():
        instance.script, instance.breaks_at, instance.step_s = (5, 6), None, 0.001
        instance.aborted.clear()
    text = await client.completions.create(
        model="tiny", prompt="abc", max_tokens=4000, extra_body=REPEATED
    )
    assert text.choices[0].finish_reason == "repetition"
    params = pb.GenerationParams(max_tokens=4000)
    params.repetition_detection.max_pattern_size = params.repetition_detection.min_count = 3
    async with grpc.aio.insecure_channel(f"127.0.0.1:{mesh.gateway.grpc.port}") as channel:
        stub = InferenceServiceStub(channel)
        told = await stub.Generate(pb.GenerateRequest(model="tiny", text="abc", params=params))
    assert told.finish_reason == FINISH_REASON_REPETITION
    decodes = [i for i in mesh.instances.values() if i.role == ROLE_DECODE]
    await until(lambda: sum(len(i.aborted) for i in decodes) == 2)
    for instance in mesh.instances.values():
        instance.step_s = 0.0


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"max_pattern_size": 257, "min_count": 2}, "max_pattern_size"),
        ({"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2}, "min_pattern_size"),
        ({"max_pattern_size": 2, "min_count": 1}, "min_count"),
        ({"max_pattern_size": 2.5}, "max_pattern_size"),
    ],
)
async def test_a_repetition_that_cannot_be_detected_is_refused(
    client: openai.AsyncOpenAI, asked: dict[str, Any], field: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await whole_text(client, False, extra_body={"repetition_detection": asked})
    assert caught.value.param == f"repetition_detection.{field}"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_begins_each_choice_with_its_prompt(
    mesh: GatewayMesh, client: openai.AsyncOpenAI, stream: bool
) -> None:
    answer = await client.completions.create(
        model="tiny", prompt=["ab", "cd"], n=2, max_tokens=6, echo=True, stream=stream
    )
    texts = [""] * 4
    if isinstance(answer, Completion):
        texts = [choice.text for choice in answer.choices]
    else:
        async for chunk in answer:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
    assert texts == [p + mesh.expected_text(p, 6) for p in ("ab", "ab", "cd", "cd")]


async def test_token_ids_come_with_the_text(mesh: GatewayMesh, client: openai.AsyncOpenAI) -> None:
    url = f"{mesh.url}/v1"
    async with httpx.AsyncClient(timeout=30) as http:
        asked = {"model": "tiny", "max_tokens": 5, "return_token_ids": True}
        body = asked | {"prompt": [10, 11, 12], "truncate_prompt_tokens": 2}
        found = (await http.post(f"{url}/completions", json=body)).json()["choices"][0]
        assert found["prompt_token_ids"] == [11, 12]
        stream = mesh.tokenizer.text_stream([11, 12])
        assert stream.feed(found["token_ids"]) + stream.finish() == found["text"]
        assert len(found["token_ids"]) == 5
        right = (
            await http.post(f"{url}/completions", json=body | {"truncation_side": "right"})
        ).json()
        assert right["choices"][0]["prompt_token_ids"] == [10, 11]
        chat = asked | {"messages": [{"role": "user", "content": "x"}], "stream": True}
        options = {"include_usage": True, "continuous_usage_stats": True}
        answer = await http.post(f"{url}/chat/completions", json=chat | {"stream_options": options})
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if "{" in line]
        ids = [i for e in events for c in e["choices"] for i in c.get("token_ids", ())]
        assert len(ids) == 5
        prompts = [e["prompt_token_ids"] for e in events if "prompt_token_ids" in e]
        assert [len(p) for p in prompts] == [events[-1]["usage"]["prompt_tokens"]]
        counted = [e["usage"]["completion_tokens"] for e in events if e["usage"]]
        assert counted == sorted(counted)
        assert counted[-1] == 5


async def test_special_tokens_are_shown_on_request(
    mesh: GatewayMesh, client: openai.AsyncOpenAI
) -> None:
    async with httpx.AsyncClient(timeout=30) as http:
        body = {"model": "tiny", "prompt": [EOS, 70], "max_tokens": 3, "echo": True}
        answer = await http.post(
            f"{mesh.url}/v1/completions", json=body | {"skip_special_tokens": False}
        )
        assert answer.json()["choices"][0]["text"].startswith("<eos>")


@pytest.mark.parametrize("is_strict", [False, True])
async def test_unknown_fields_are_named_or_refused(tmp_path: Path, is_strict: bool) -> None:
    async with (
        gateway_mesh(tmp_path, strict_fields=is_strict) as mesh,
        httpx.AsyncClient(timeout=30) as http,
    ):
        body = {"model": "tiny", "prompt": "ab", "max_tokens": 3, "future": {"a": [1]}}
        answer = await http.post(f"{mesh.url}/v1/completions", json=body)
        if is_strict:
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, "future")
            return
        assert (answer.status_code, answer.headers["x-pdmesh-ignored"]) == (200, "future")
        assert answer.json()["choices"][0]["text"] == mesh.expected_text("ab", 3)
        known = await http.post(f"{mesh.url}/v1/completions", json=body | {"use_beam_search": True})
        assert known.status_code == 400, "it would change the answer"
        assert known.json()["error"]["param"] == "use_beam_search"


async def test_fields_that_the_engines_setup_excludes_are_refused(
    mesh: GatewayMesh, client: openai.AsyncOpenAI
) -> None:
    """vLLM's speculation does not support min_p, and the simulated engine does not support
    reasoning.
    """
    decode = next(i for i in mesh.instances.values() if i.role == ROLE_DECODE)
    record = decode.record()
    record.unsupported_shaping.extend(["a_later_field", "min_p", "thinking_token_budget"])
    mesh.register(record)
    await asyncio.sleep(0)
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(
            model="tiny", prompt="abc", max_tokens=4, extra_body={"min_p": 0.5}
        )
    assert caught.value.param == "min_p"
    with pytest.raises(openai.BadRequestError, match="engine as it is set up") as caught:
        await client.completions.create(
            model="tiny", prompt="abc", max_tokens=4, extra_body={"thinking_token_budget": 1}
        )
    assert caught.value.param == "thinking_token_budget"
    await client.completions.create(
        model="tiny", prompt="abc", max_tokens=4, extra_body={"top_k": 2}
    )
