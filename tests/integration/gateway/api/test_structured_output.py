"""Tests structured output, in which a client asks for an answer of a certain form, such as a JSON
schema.

The gateway must send the form as a grammar with each leg, which is a request's stay on one
instance. This applies to HTTP and gRPC. It must refuse an invalid form before the request takes a
slot of an instance.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import grpc
import httpx
import openai
import pytest

from pdmesh.core.sampling.grammar_limits import MAX_GRAMMAR_BYTES
from pdmesh.engine.grammars.asked_grammars import AskedGrammar
from pdmesh.engine.grammars.checker import Checked
from pdmesh.services.gateway.text.grammar_checks import GrammarChecks
from pdmesh.services.gateway.text.tokenizer import Tokenizer
from pdmesh.v1 import inference_service_pb2 as pb
from pdmesh.v1.common_pb2 import ROLE_DECODE
from pdmesh.v1.inference_service_pb2_grpc import InferenceServiceStub
from tests.fakes.gateway_mesh import GatewayMesh
from tests.support.waiting import until

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}
TAG = {"triggers": ["<f"], "structures": [{"begin": "<f=a>", "schema": SCHEMA, "end": "</f>"}]}


def json_schema(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}


def sent(mesh: GatewayMesh) -> list[str]:
    """The grammars that the gateway sent, one for each leg."""
    instances = mesh.instances.values()
    told = [leg.sampling for i in instances for leg in i.prefills]
    told += [leg.sampling for i in instances for leg in i.starts]
    return [sampling.constraint.grammar for sampling in told]


@pytest.mark.fault("F7")
async def test_each_leg_gets_the_form_even_after_a_death(
    mesh: GatewayMesh, client: openai.AsyncOpenAI
) -> None:
    for decode in (i for i in mesh.instances.values() if i.role == ROLE_DECODE):
        decode.breaks_at = 4
    answer = await client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "abc"}],
        max_tokens=12,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    legs = sent(mesh)
    assert len(legs) >= 4, "two of them came after a death"
    assert len(set(legs)) == 1
    assert json.loads(legs[0])["grammars"][0]["json_schema"]["required"] == ["n"]


async def test_a_request_without_a_form_carries_none_and_starts_no_process(
    mesh: GatewayMesh, client: openai.AsyncOpenAI
) -> None:
    await client.completions.create(
        model="tiny", prompt="abc", max_tokens=4, extra_body={"response_format": {"type": "text"}}
    )
    assert set(sent(mesh)) == {""}
    assert mesh.gateway.frontend.shared.grammars._work is None


@pytest.mark.parametrize(
    ("http_body", "kind", "value"),
    [
        (json_schema(SCHEMA), "json_schema", json.dumps(SCHEMA)),
        ({"response_format": {"type": "json_object"}}, "json_object", True),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json_schema", json.dumps(SCHEMA)),
        ({"structured_outputs": {"json_object": True}}, "json_object", True),
        ({"structured_outputs": {"regex": "[0-9]+"}}, "regex", "[0-9]+"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", pb.Choices(choices=["a", "b"])),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, "grammar", 'root ::= "a"'),
        ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, "structural_tag",
         json.dumps(TAG)),
        ({"response_format": {"type": "structural_tag", **TAG}}, "structural_tag", json.dumps(TAG)),
    ],
)  # fmt: skip
async def test_grpc_has_the_same_forms(
    mesh: GatewayMesh, client: openai.AsyncOpenAI, http_body: Any, kind: str, value: Any
) -> None:
    await client.completions.create(model="tiny", prompt="abc", max_tokens=3, extra_body=http_body)
    form = pb.StructuredOutput(**{kind: value})
    params = pb.GenerationParams(max_tokens=3, structured_output=form)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{mesh.gateway.grpc.port}") as channel:
        stub = InferenceServiceStub(channel)
        await stub.Generate(pb.GenerateRequest(model="tiny", text="abc", params=params))
    legs = sent(mesh)
    assert len(legs) == 4
    assert "" not in legs
    assert len({json.dumps(_sorted(leg)) for leg in legs}) == 1


def _sorted(grammar: str) -> Any:
    """A text that is equal for two grammars with the same keys in different order."""
    try:
        return json.dumps(json.loads(grammar), sort_keys=True)
    except ValueError:
        return "".join(sorted(grammar))


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (json_schema({"$ref": "#"}), "response_format.json_schema.schema"),
        (json_schema({"$ref": "http://localhost/x"}), "response_format.json_schema.schema"),
        (json_schema({"type": "strin"}), "response_format.json_schema.schema"),
        (json_schema({"not": {}}), "response_format.json_schema.schema"),
        (json_schema({"type": "array", "items": {"type": "object"}, "maxItems": 10**9}),
         "response_format.json_schema.schema"),
        (json_schema({"enum": ["x" * MAX_GRAMMAR_BYTES]}), "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
         "response_format.json_schema.schema"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}},
         "response_format.format"),
        ({"response_format": {"type": "structural_tag", "structures": [{"begin": "<f"}]}},
         "response_format.structures"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a\0b"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "(?=a)b"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": "root ::= root"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"json": None}, **json_schema(SCHEMA)}, "structured_outputs"),
        ({"structured_outputs": {"whitespace_pattern": " "}},
         "structured_outputs.whitespace_pattern"),
        ({"structured_outputs": {"regex": "a"}, **json_schema(SCHEMA)}, "structured_outputs"),
    ],
)  # fmt: skip
async def test_an_invalid_form_is_a_400_that_names_the_field_and_takes_no_slot(
    mesh: GatewayMesh, body: dict[str, Any], field: str
) -> None:
    async with httpx.AsyncClient(timeout=60) as http:
        answer = await http.post(
            f"{mesh.url}/v1/completions", json={"model": "tiny", "prompt": "a", **body}
        )
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == field
    assert len(answer.content) < 1500
    assert sent(mesh) == []


async def test_the_copies_of_a_grammar_for_many_choices_are_bounded(
    mesh: GatewayMesh, client: openai.AsyncOpenAI
) -> None:
    """The gateway sends the grammar for each choice of each prompt to the prefill, to the decode,
    and again after each death.
    """
    choices = [f"{number:08d}{'x' * 50}" for number in range(MAX_GRAMMAR_BYTES // 180)]
    body = {"structured_outputs": {"choice": choices}}
    with pytest.raises(openai.BadRequestError, match="64 choices with a grammar for each") as got:
        await client.completions.create(
            model="tiny", prompt=["a"] * 4, n=16, max_tokens=2, extra_body=body
        )
    assert got.value.param == "structured_outputs.choice"
    assert sent(mesh) == []
    answer = await client.completions.create(
        model="tiny", prompt="a", n=16, max_tokens=2, extra_body=body
    )
    assert len(answer.choices) == 16


async def test_an_instance_of_another_version_is_not_asked_to_keep_a_form(
    mesh: GatewayMesh, client: openai.AsyncOpenAI
) -> None:
    """An instance without support for grammars would draw any text."""
    old = next(iter(mesh.instances.values()))
    old.supports_constraints = False
    mesh.register(old.record())
    with pytest.raises(openai.BadRequestError, match="not supported"):
        await client.completions.create(
            model="tiny", prompt="abc", extra_body={"structured_outputs": {"regex": "a"}}
        )


async def test_hostile_forms_do_not_delay_clients_without_a_form(
    mesh: GatewayMesh, client: openai.AsyncOpenAI
) -> None:
    """Requests with a form wait for the process that compiles grammars. Other requests must not
    wait.
    """
    explodes = {"type": "array", "items": {"type": "integer"}, "maxItems": 10**9}
    async with httpx.AsyncClient(timeout=120) as http:
        hostile = [
            asyncio.create_task(
                http.post(
                    f"{mesh.url}/v1/completions",
                    json={
                        "model": "tiny",
                        "prompt": "a",
                        **json_schema(explodes | {"title": str(n)}),
                    },
                )
            )
            for n in range(3)
        ]
        num_served = 0
        while not hostile[0].done():
            await client.completions.create(model="tiny", prompt="abc", max_tokens=2)
            num_served += 1
        assert num_served > 3
        assert [answer.status_code for answer in await asyncio.gather(*hostile)] == [400] * 3


class HeldChecker:
    """A grammar checker that finishes no check until the test sets `is_free`."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.is_free = asyncio.Event()

    def key(self, tokenizer: Tokenizer) -> int:
        return 1

    async def check(self, asked: AskedGrammar, tokenizer: Tokenizer) -> Checked:
        self.asked.append(asked.text)
        await self.is_free.wait()
        return Checked(grammar="{}")

    async def close(self) -> None:
        pass


@pytest.mark.parametrize("path", ["completions", "chat/completions", "responses", "messages"])
async def test_when_a_client_leaves_its_waiting_form_is_dropped(
    mesh: GatewayMesh, path: str
) -> None:
    """The second form waits to be compiled. When its client leaves, no request needs the result any
    more.
    """
    checker = HeldChecker()
    mesh.gateway.frontend.shared.grammars = grammars = GrammarChecks(checker)

    def body(name: str) -> dict[str, Any]:
        schema = {"type": "object", "title": name}
        chat = [{"role": "user", "content": "x"}]
        match path:
            case "completions":
                return {"prompt": "x", **json_schema(schema)}
            case "chat/completions":
                return {"messages": chat, **json_schema(schema)}
            case "responses":
                form = {"type": "json_schema", "name": "x", "schema": schema}
                return {"input": "x", "text": {"format": form}}
            case _:
                form = {"format": {"type": "json_schema", "schema": schema}}
                return {"messages": chat, "output_config": form}

    async def ask(http: httpx.AsyncClient, name: str) -> httpx.Response:
        limit = "max_output_tokens" if path == "responses" else "max_tokens"
        asked = {"model": "tiny", limit: 2, **body(name)}
        return await http.post(f"{mesh.url}/v1/{path}", json=asked, timeout=120)

    async with httpx.AsyncClient() as http:
        first = asyncio.create_task(ask(http, "first"))
        await until(lambda: checker.asked)
        async with httpx.AsyncClient() as leaving:
            second = asyncio.create_task(ask(leaving, "second"))
            await until(lambda: len(grammars._room) == 1)
            second.cancel()
            await asyncio.gather(second, return_exceptions=True)
        await until(lambda: not len(grammars._room))
        checker.is_free.set()
        assert (await first).status_code == 200
    assert len(checker.asked) == 1
    assert mesh.gateway.frontend.num_calls == 0
