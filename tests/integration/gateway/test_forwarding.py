"""Tests that a gateway keeps no state between requests, encodes each text only once, and forwards
each token at once.
"""

from __future__ import annotations

import asyncio
import json
import re
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdmesh.core.kv.prefix.block_hash import tokens_to_bytes
from pdmesh.services.gateway.gateway import Gateway
from pdmesh.services.gateway.routing.fleet import MeshView
from pdmesh.services.gateway.settings import Settings
from pdmesh.services.gateway.text.tokenizer_pool import TokenizerPool
from pdmesh.v1 import instance_service_pb2 as pb
from pdmesh.v1.common_pb2 import ROLE_DECODE
from tests.fakes.fake_instance import FakeInstance
from tests.fakes.gateway_mesh import GatewayMesh, gateway_mesh
from tests.fakes.memory_registry import MemoryView
from tests.support.waiting import until

# The text is too long for the event loop, so a thread encodes it.
TEXT = "What is passed on, and how often? " * 80
SHORT = "one, two"


@asynccontextmanager
async def second_gateway(mesh: GatewayMesh, directory: Path) -> AsyncIterator[str]:
    """The URL of a second gateway over the same instances, as if it ran in another process."""
    settings = Settings(
        http_port=0, grpc_port=0, drain_s=1.0, instance_id="gateway-1",
        hash_secret=mesh.settings.hash_secret,
    )  # fmt: skip
    tokenizers = TokenizerPool(settings.tokenizer_rules)
    await tokenizers.load_own(directory / "tiny")
    gateway = Gateway(settings, MeshView(MemoryView(mesh.store)), tokenizers, mesh, list, None)
    await gateway.start()
    try:
        yield f"http://127.0.0.1:{gateway.http.port}"
    finally:
        await gateway.stop()


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=60) as client:
        yield client


PLAIN: Any = {"model": "tiny", "prompt": TEXT, "max_tokens": 24}
ASKED: Any = {
    "a text": PLAIN,
    "tokens": {**PLAIN, "prompt": [40 + i % 40 for i in range(100)]},
    "two prompts, four choices": {**PLAIN, "prompt": [SHORT, TEXT], "n": 2, "seed": 7},
    "a seed": {**PLAIN, "temperature": 1.3, "seed": 11},
    "a stop string": {**PLAIN, "prompt": SHORT, "max_tokens": 200, "stop": ["a", "b", "c"]},
    "a chat": {
        "model": "tiny", "max_tokens": 24, "messages": [{"role": "user", "content": TEXT}],
    },
    "too much": {**PLAIN, "max_tokens": 1 << 20},
    "a model that is not there": {**PLAIN, "model": "other"},
    "no number": {**PLAIN, "max_tokens": "many"},
}  # fmt: skip
OWN = re.compile(rb'"id":"[a-z]+-[0-9a-f]+"|"created":\d+|req-[0-9a-f]+')


async def whole(client: httpx.AsyncClient, url: str, body: Any) -> tuple[int, bytes]:
    """The status and the bytes of an answer, without the id and the creation time."""
    answer = await client.post(f"{url}{path_of(body)}", json=body)
    return answer.status_code, OWN.sub(b"", answer.content)


async def streamed(client: httpx.AsyncClient, url: str, body: Any) -> dict[str, Any]:
    """The content of a streamed answer, independent of its division into chunks. The text of each
    choice is joined.
    """
    found: dict[str, Any] = {}
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with client.stream("POST", f"{url}{path_of(body)}", json=asked) as answer:
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                found[line] = found.get(line, 0) + (line != "")
                continue
            event = json.loads(line.removeprefix("data: "))
            for name in ("object", "model", "usage", "error"):
                found[name] = event.get(name) or found.get(name)
            for choice in event.get("choices", ()):
                index = choice["index"]
                text = choice.get("text") or choice.get("delta", {}).get("content") or ""
                found[f"text {index}"] = found.get(f"text {index}", "") + text
                found[f"end {index}"] = choice["finish_reason"] or found.get(f"end {index}")
    return found


def path_of(body: Any) -> str:
    return "/v1/chat/completions" if "messages" in body else "/v1/completions"


@pytest.mark.req("S69")
@pytest.mark.parametrize("name", list(ASKED))
async def test_two_gateways_give_the_same_bytes_and_ask_instances_for_the_same(
    tmp_path: Path, client: httpx.AsyncClient, name: str
) -> None:
    """One of the two gateways has served requests before. Its answers and its commands to the
    instances must not show this history.
    """
    body = ASKED[name]
    async with gateway_mesh(tmp_path) as mesh, second_gateway(mesh, tmp_path) as other:
        for _ in range(3):
            await client.post(f"{mesh.url}/v1/completions", json={**PLAIN, "prompt": "before"})
        prefill, decode = mesh.instances["prefill-0"], mesh.instances["decode-0"]
        answers, streams, asked = [], [], []
        for url in (mesh.url, other):
            prefill.prefills.clear()
            decode.starts.clear()
            answers.append(await whole(client, url, body))
            streams.append(await streamed(client, url, body))
            asked.append([commands_of(prefill.prefills), commands_of(decode.starts)])
        assert len(answers[0][1]) > 50
        assert answers[0] == answers[1]
        assert streams[0] == streams[1]
        assert asked[0] == asked[1]
        assert bool(asked[0][0]) == (answers[0][0] == httpx.codes.OK)


def commands_of(commands: Sequence[pb.Prefill] | Sequence[pb.Start]) -> list[bytes]:
    """The commands as bytes, without the ids and times that belong to one request."""
    found = []
    for command in commands:
        rest = type(command)()
        rest.CopyFrom(command)  # type: ignore[arg-type]  # of its own type
        for field in ("key", "request_id", "traceparent", "remaining_ms", "ticket"):
            if field in rest.DESCRIPTOR.fields_by_name:
                rest.ClearField(field)  # type: ignore[arg-type]  # checked above
        found.append(rest.SerializeToString(deterministic=True))
    return sorted(found)


class CountingEncoder:
    """The library's tokenizer, with a list of the texts that it has encoded."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.texts: list[str] = []

    def encode_batch_fast(self, texts: list[str], *, add_special_tokens: bool) -> Any:
        self.texts += texts
        return self.inner.encode_batch_fast(texts, add_special_tokens=add_special_tokens)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@pytest.mark.req("S69")
@pytest.mark.parametrize("text", [SHORT, TEXT], ids=["short", "long"])
async def test_a_text_is_encoded_once_for_all_choices_rejections_and_lost_legs(
    tmp_path: Path, client: httpx.AsyncClient, text: str
) -> None:
    """Prefill and decode use the tokens of the first encoding, and so do the instances that
    continue the answer after a death.
    """
    async with gateway_mesh(tmp_path, num_prefills=2) as mesh:
        tokenizer = mesh.tokenizer
        encoder = tokenizer._inner = CountingEncoder(tokenizer._inner)  # type: ignore[assignment]  # counts
        mesh.instances["prefill-0"].reject_with = pb.REJECT_REASON_BUSY
        mesh.instances["decode-0"].breaks_at = 10
        body = {**PLAIN, "prompt": text, "n": 3, "max_tokens": 40}
        answer = await client.post(f"{mesh.url}/v1/completions", json=body)
        assert answer.status_code == 200
        assert encoder.texts == [text]
        begin = tokens_to_bytes(array("I", encoder.inner.encode(text).ids))
        prompts = [
            *(leg.prompt_token_ids for i in mesh.instances.values() for leg in i.prefills),
            *(leg.prompt_token_ids for i in mesh.instances.values() for leg in i.starts),
        ]
        assert all(prompt.startswith(begin) for prompt in prompts)
        assert max(map(len, prompts)) > len(begin) + 4, "one leg continued from the drawn tokens"
        expected = mesh.expected_text(text, 40)
        assert [choice["text"] for choice in answer.json()["choices"]] == [expected] * 3


@pytest.mark.req("S39")
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_each_token_is_with_the_client_before_the_next_is_computed(
    tmp_path: Path, client: httpx.AsyncClient, path: str
) -> None:
    """The decode takes a step only after the client has read the previous token.

    So a gateway that collects tokens before it forwards them would wait forever. The time that
    forwarding costs is in loadtests/results/overhead-2026-11-22.md.
    """
    num_tokens = 24
    async with gateway_mesh(tmp_path, num_decodes=0, stall_s=600.0) as mesh:
        decode = await mesh.add(FakeInstance(ROLE_DECODE, "decode-0", step_s=1e6))
        asked = (
            {"messages": [{"role": "user", "content": SHORT}]}
            if "chat" in path
            else {"prompt": SHORT}
        )
        body = {"model": "tiny", **asked, "max_tokens": num_tokens, "stream": True}
        shown: list[str] = []
        async with client.stream("POST", f"{mesh.url}{path}", json=body) as answer:
            lines = answer.aiter_lines()
            await until(lambda: decode.legs)
            for number in range(num_tokens):
                if number:
                    decode.step()
                async with asyncio.timeout(60):
                    shown.append(await next_text(lines))
            assert [line async for line in lines if line][-1] == "data: [DONE]"
        prompt = mesh.chat_prompt(SHORT) if "chat" in path else SHORT
        assert "".join(shown) == mesh.expected_text(prompt, num_tokens)
        assert all(shown)
        assert len(mesh.instances["prefill-0"].prefills) == 1, "no other leg continued it"


async def next_text(lines: AsyncIterator[str]) -> str:
    """The text of the next event with a text."""
    async for line in lines:
        if line.startswith("data: {"):
            (choice,) = json.loads(line.removeprefix("data: "))["choices"]
            if text := choice.get("text") or choice.get("delta", {}).get("content"):
                return str(text)
    raise AssertionError("the stream ended before its last token")
