"""Tests the parts of the OpenAI API that have no file of their own, and the answers to hostile or
broken clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types import Completion
from tokenizers.processors import TemplateProcessing

from tests.fakes.gateway_mesh import GatewayMesh, gateway_mesh
from tests.fakes.tiny_model import EOS
from tests.support.waiting import until


async def test_n_choices_run_side_by_side_and_keep_their_index(
    mesh: GatewayMesh, client: openai.AsyncOpenAI
) -> None:
    answer = await client.completions.create(model="tiny", prompt=["ab", "cd"], n=2, max_tokens=6)
    expected = [mesh.expected_text(p, 6) for p in ("ab", "ab", "cd", "cd")]
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    assert [c.text for c in answer.choices] == expected
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 24)
    texts = [""] * 4
    async for chunk in await client.completions.create(
        model="tiny", prompt=["ab", "cd"], n=2, max_tokens=6, stream=True
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == expected


async def test_tokenize_gives_the_tokens_that_a_request_would_have(
    mesh: GatewayMesh, client: openai.AsyncOpenAI
) -> None:
    url = f"{str(client.base_url).removesuffix('/v1/')}/tokenize"
    chat = [{"role": "user", "content": "hello"}]
    async with httpx.AsyncClient() as http:
        answer = (await http.post(url, json={"model": "tiny", "messages": chat})).json()
        assert answer["count"] == len(answer["tokens"]) == len(mesh.chat_prompt("hello"))
        text = (await http.post(url, json={"model": "tiny", "prompt": "ab"})).json()
        assert text["count"] == 2
        for body in ({"model": "tiny"}, {"model": "tiny", "prompt": "ab", "messages": chat}):
            refused = await http.post(url, json=body)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")


async def test_tokenize_takes_the_fields_of_vllm(mesh: GatewayMesh) -> None:
    mesh.tokenizer._inner.post_processor = TemplateProcessing(
        single="<eos> $A", special_tokens=[("<eos>", EOS)]
    )
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "So "}]
    user, tools = chat[:1], [{"type": "function", "function": {"name": "f"}}]
    async with httpx.AsyncClient(base_url=mesh.url) as http:

        async def told(**fields: object) -> httpx.Response:
            return await http.post("/tokenize", json={"model": "tiny", **fields})

        async def text_of(**fields: object) -> str:
            answer = (await told(**fields)).json()
            assert answer["count"] == len(answer["tokens"])
            asked = {"model": "tiny", "tokens": answer["tokens"]}
            return str((await http.post("/detokenize", json=asked)).json()["prompt"])

        rendered = mesh.chat_prompt("hi")
        assert await text_of(prompt="ab") == "<eos>ab"
        assert await text_of(prompt="ab", add_special_tokens=False) == "ab"
        assert await text_of(messages=user, tools=tools) == rendered
        assert await text_of(messages=user, add_special_tokens=True) == f"<eos>{rendered}"
        unopened = rendered.removesuffix("<assistant>")
        assert await text_of(messages=user, add_generation_prompt=False) == unopened
        continued: dict[str, object] = {"messages": chat, "continue_final_message": True}
        assert (await text_of(**continued, add_generation_prompt=False)).endswith("So ")
        assert (await told(prompt="a b")).json()["token_strs"] is None
        strings = (await told(prompt="a b", return_token_strs=True)).json()["token_strs"]
        assert strings == ["<eos>", "a", "\u0120", "b"]
        for fields, field in (
            (continued, "continue_final_message"),
            ({**continued, "add_generation_prompt": True}, "continue_final_message"),
            ({"messages": user, "chat_template": "{{ 1 }}"}, "chat_template"),
            ({"messages": user, "media_io_kwargs": {"image": {}}}, "media_io_kwargs"),
            ({"prompt": "a", "continue_final_message": True}, "continue_final_message"),
            ({"prompt": "a", "tools": tools}, "tools"),
            ({"prompt": "a", "return_token_strs": 1}, "return_token_strs"),
        ):
            refused = await told(**fields)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)


async def test_a_client_decides_whether_its_prompt_gets_special_tokens(
    mesh: GatewayMesh, client: openai.AsyncOpenAI
) -> None:
    mesh.tokenizer._inner.post_processor = TemplateProcessing(
        single="<eos> $A", special_tokens=[("<eos>", EOS)]
    )
    chat: Any = [{"role": "user", "content": "hi"}]
    for given, num_more in ((None, 1), (True, 1), (False, 0)):
        completion = await client.completions.create(
            model="tiny", prompt="ab", max_tokens=1, extra_body={"add_special_tokens": given}
        )
        assert completion.usage is not None
        assert completion.usage.prompt_tokens == 2 + num_more
    for given, num_more in ((None, 0), (True, 1), (False, 0)):
        answer = await client.chat.completions.create(
            model="tiny", messages=chat, max_tokens=1, extra_body={"add_special_tokens": given}
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(mesh.chat_prompt("hi")) + num_more


async def test_a_chat_continues_its_final_message(
    mesh: GatewayMesh, client: openai.AsyncOpenAI
) -> None:
    begun: Any = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "So "}]
    further = {"add_generation_prompt": False, "continue_final_message": True}
    answer = await client.chat.completions.create(
        model="tiny", messages=begun, max_tokens=8, extra_body=further
    )
    prompt = f"{mesh.chat_prompt('hi')}So "
    assert answer.choices[0].message.content == mesh.expected_text(prompt, 8)


async def test_detokenize_gives_back_the_text(mesh: GatewayMesh) -> None:
    async with httpx.AsyncClient(base_url=mesh.url) as http:

        async def text_of(*tokens: object) -> httpx.Response:
            return await http.post("/detokenize", json={"model": "tiny", "tokens": tokens})

        body = {"model": "tiny", "prompt": "h\u00e9llo \U0001f600"}
        tokens = (await http.post("/tokenize", json=body)).json()["tokens"]
        assert (await text_of(*tokens)).json() == {"prompt": body["prompt"]}
        assert (await text_of(EOS)).json() == {"prompt": "<eos>"}, "special tokens become text, too"
        vocab_size = mesh.tokenizer.vocab_size
        for wrong, field in (
            ([-1], "tokens"), ([vocab_size], "tokens"), ([1] * 4097, "tokens"),
            (["1"], "tokens[0]"), ([1 << 70], "tokens"),
        ):  # fmt: skip
            refused = await text_of(*wrong)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_the_text_before_it_and_frees_the_legs(
    mesh: GatewayMesh, client: openai.AsyncOpenAI, stream: bool
) -> None:
    whole = mesh.expected_text("abc", 60)
    stop = whole[20:23]
    answer = await client.completions.create(
        model="tiny", prompt="abc", max_tokens=2000, stop=[stop, "never"], stream=stream
    )
    if isinstance(answer, Completion):
        chunks = answer.choices
    else:
        chunks = [c.choices[0] async for c in answer]
    assert "".join(c.text for c in chunks) == whole[: whole.index(stop)]
    assert chunks[-1].finish_reason == "stop"
    await until(lambda: mesh.num_legs == 0)


async def test_logprobs_come_in_both_forms_or_are_refused(tmp_path: Path) -> None:
    async with (
        gateway_mesh(tmp_path) as mesh,
        openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none") as client,
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(model="tiny", prompt="abc", logprobs=1)
        assert caught.value.param == "logprobs"
        for instance in mesh.instances.values():
            instance.supports_logprobs = True
            mesh.register(instance.record())
        completion = await client.completions.create(
            model="tiny", prompt="abc", max_tokens=5, logprobs=2
        )
        logprobs = completion.choices[0].logprobs
        assert logprobs is not None
        assert "".join(logprobs.tokens or []) == completion.choices[0].text
        assert logprobs.token_logprobs == [-0.5] * 5
        streamed: list[int] = []
        async for piece in await client.completions.create(
            model="tiny", prompt="abc", max_tokens=5, logprobs=2, stop="never", stream=True
        ):
            found = piece.choices[0].logprobs
            streamed += (found.text_offset or []) if found else []
        assert streamed == logprobs.text_offset == [0, 1, 2, 3, 4], (
            "every token has its logprobs although text is held back"
        )
        chat = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "x"}],
            max_tokens=5,
            logprobs=True,
            top_logprobs=2,
            stream=True,
        )
        text, tokens = "", ""
        async for chunk in chat:
            choice = chunk.choices[0]
            text += choice.delta.content or ""
            for entry in (choice.logprobs.content or []) if choice.logprobs else []:
                tokens += entry.token
                assert len(entry.top_logprobs) == 2
        assert text == tokens == mesh.expected_text(mesh.chat_prompt("x"), 5)


def test_the_synchronous_client_works_too(tmp_path: Path) -> None:
    async def run() -> str:
        async with gateway_mesh(tmp_path) as mesh:

            def ask() -> str:
                with openai.OpenAI(base_url=f"{mesh.url}/v1", api_key="none") as client:
                    assert [m.id for m in client.models.list()] == ["tiny"]
                    assert client.models.retrieve("default").id == "tiny"
                    stream = client.chat.completions.create(
                        model="tiny",
                        messages=[{"role": "user", "content": "x"}],
                        max_tokens=9,
                        stream=True,
                    )
                    return "".join(c.choices[0].delta.content or "" for c in stream)

            assert await asyncio.to_thread(ask) == mesh.expected_text(mesh.chat_prompt("x"), 9)
            return "done"

    assert asyncio.run(run()) == "done"


async def test_errors_have_the_form_of_openai(
    mesh: GatewayMesh, client: openai.AsyncOpenAI
) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await client.completions.create(model="tiny", prompt="x", temperature=9)
    assert bad.value.param == "temperature"
    assert bad.value.type == "invalid_request_error"
    assert bad.value.request_id
    with pytest.raises(openai.NotFoundError) as missing:
        await client.completions.create(model="gpt-5", prompt="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "x"}], max_completion_tokens=10**6
        )
    assert (long.value.param, long.value.code) == (
        "max_completion_tokens",
        "context_length_exceeded",
    )


@pytest.mark.fault("F31")
async def test_paths_methods_and_sizes_are_checked(tmp_path: Path) -> None:
    async with gateway_mesh(tmp_path, max_body_bytes=2048) as mesh, httpx.AsyncClient() as client:
        url = f"{mesh.url}/v1/completions"

        async def chunks() -> Any:
            for _ in range(100):
                yield b"x" * 1000

        answers = {
            "unknown path": (await client.get(f"{mesh.url}/v1/nope"), 404),
            "wrong method": (await client.get(url), 405),
            "announced too large": (await client.post(url, content=b"x" * 4000), 413),
            "grows too large": (await client.post(url, content=chunks()), 413),
            "not JSON": (await client.post(url, content=b"{"), 400),
        }
        for case, (response, status) in answers.items():
            assert response.status_code == status, case
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}, case
        assert answers["wrong method"][0].headers["allow"] == "POST"
        removed = await client.delete(f"{mesh.url}/v1/models/tiny")
        assert (removed.status_code, removed.headers["allow"]) == (405, "GET")


@pytest.mark.fault("F31")
async def test_a_percent_encoded_path_is_another_path_but_may_name_a_model(
    mesh: GatewayMesh,
) -> None:
    async with httpx.AsyncClient(base_url=mesh.url) as client:
        for path, status in (
            ("/v1/models", 200), ("/v1%2fmodels", 404), ("/v1/%6dodels", 404),
            ("/v1/models/tiny", 200), ("/v1/models/%74iny", 200), ("/metrics", 404),
        ):  # fmt: skip
            assert (await client.get(path)).status_code == status, path


@pytest.mark.fault("F29")
async def test_a_slow_or_swollen_request_head_is_cut(tmp_path: Path) -> None:
    async with gateway_mesh(tmp_path, receive_timeout_s=0.3, max_header_bytes=2048) as mesh:
        port = mesh.gateway.http.port

        async def answer(data: bytes) -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(data)
            async with asyncio.timeout(60):
                got = await reader.read(4096)
            writer.close()
            return got

        assert b"408" in await answer(b"")
        assert b"408" in await answer(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n")
        assert b"431" in await answer(b"GET / HTTP/1.1\r\nx: " + b"a" * 4000)
        assert b"200" in await answer(b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n")


async def test_metrics_and_the_finished_event_match_the_requests(
    mesh: GatewayMesh, client: openai.AsyncOpenAI
) -> None:
    await client.completions.create(model="tiny", prompt="secret canary", max_tokens=5)
    await until(lambda: bool(mesh.events))
    event = mesh.events[-1]
    assert (event.outcome, event.reason, event.usage.num_completion_tokens) == (
        "completed",
        "length",
        5,
    )
    assert event.ttft_ms > 0
    assert event.e2e_ms >= event.ttft_ms
    assert "canary" not in str(event)


async def test_no_stream_chunk_is_anything_but_valid_json(
    mesh: GatewayMesh, client: openai.AsyncOpenAI
) -> None:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 20,
        "stream": True,
        "stream_options": {"include_usage": True},
        "n": 2,
    }
    async with httpx.AsyncClient() as plain:
        response = await plain.post(f"{mesh.url}/v1/chat/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    parsed = [json.loads(e.removeprefix("data: ")) for e in events[:-2]]
    assert all(p["usage"] is None for p in parsed[:-1])
    assert parsed[-1]["choices"] == []
    assert parsed[-1]["usage"]["completion_tokens"] == 40
    assert {p["object"] for p in parsed} == {"chat.completion.chunk"}


@pytest.mark.fault("F29")
async def test_the_number_of_connections_from_one_address_is_bounded(tmp_path: Path) -> None:
    async with gateway_mesh(tmp_path, max_connections_per_ip=5) as mesh:
        port = mesh.gateway.http.port
        opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(5)]
        await until(lambda: mesh.gateway.http.num_connections == 5)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()
        opened[0][1].close()
        await until(lambda: mesh.gateway.http.num_connections == 4)
        async with httpx.AsyncClient() as client:
            assert (await client.get(f"{mesh.url}/health/live")).status_code == 200
        for _, writer in opened:
            writer.close()


@pytest.mark.fault("F36")
async def test_a_503_says_when_to_come_back(tmp_path: Path) -> None:
    async with gateway_mesh(tmp_path, 0, 0, model="tiny") as mesh, httpx.AsyncClient() as client:
        body = {"model": "tiny", "prompt": "abc", "max_tokens": 4}
        response = await client.post(f"{mesh.url}/v1/completions", json=body)
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"


@pytest.mark.fault("F31")
@pytest.mark.parametrize("stream", [False, True])
async def test_a_large_amount_of_text_at_once_arrives_whole_and_in_order(
    mesh: GatewayMesh, client: openai.AsyncOpenAI, stream: bool
) -> None:
    """Eight choices of 3,000 tokens come in one step. The gateway cannot write so much text within
    one turn of its event loop.
    """
    for instance in mesh.instances.values():
        instance.tokens_per_step = 3000
    answer: Any = await client.completions.create(
        model="tiny", prompt="abc", n=8, max_tokens=3000, stream=stream
    )
    texts = [""] * 8
    for part in [c async for c in answer] if stream else [answer]:
        for choice in part.choices:
            texts[choice.index] += choice.text
    assert texts == [mesh.expected_text("abc", 3000)] * 8


@pytest.mark.fault("F31")
@pytest.mark.parametrize("stream", [False, True])
async def test_thousands_of_logprobs_all_arrive(tmp_path: Path, stream: bool) -> None:
    """The gateway converts so many tokens to text on a thread beside the event loop."""
    async with (
        gateway_mesh(tmp_path) as mesh,
        openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none") as client,
    ):
        for instance in mesh.instances.values():
            instance.supports_logprobs, instance.tokens_per_step = True, 2000
            mesh.register(instance.record())
        answer: Any = await client.completions.create(
            model="tiny", prompt="abc", max_tokens=2000, logprobs=5, stream=stream
        )
        tokens: list[str] = []
        for part in [c async for c in answer] if stream else [answer]:
            for choice in part.choices:
                tokens += choice.logprobs.tokens or [] if choice.logprobs else []
        assert len(tokens) == 2000
        assert "".join(tokens) == mesh.expected_text("abc", 2000)
