"""Tests `parse()` of the official client. The gateway sends the form of the requested object to
each instance that serves the request, and the client makes an object from the text.
"""

from __future__ import annotations

import json

import anthropic
import openai
import pydantic

from tests.fakes.gateway_mesh import GatewayMesh
from tests.fakes.tiny_model import EOS


class Person(pydantic.BaseModel):
    name: str
    age: int


ADA = Person(name="Ada", age=36)


def answers(mesh: GatewayMesh, text: str) -> None:
    """Make all instances write `text`. They receive the grammar, but ignore it."""
    for instance in mesh.instances.values():
        instance.script = [*mesh.tokenizer._encode(text, add_special_tokens=False), EOS]


def told(mesh: GatewayMesh) -> list[str]:
    """The field names in the grammars that the gateway sent, for each instance that served a
    request.
    """
    instances = mesh.instances.values()
    legs = [leg.sampling for i in instances for leg in i.prefills]
    legs += [leg.sampling for i in instances for leg in i.starts]
    grammars = [json.loads(leg.constraint.grammar)["grammars"][0] for leg in legs]
    return [" ".join(sorted(g["json_schema"]["properties"])) for g in grammars]


async def test_a_response_becomes_an_object(mesh: GatewayMesh, client: openai.AsyncOpenAI) -> None:
    answers(mesh, ADA.model_dump_json())
    response = await client.responses.parse(
        model="tiny", input="Who?", text_format=Person, max_output_tokens=200
    )
    assert response.output_parsed == ADA
    assert response.status == "completed"
    async with client.responses.stream(
        model="tiny", input="Who?", text_format=Person, max_output_tokens=200
    ) as stream:
        final = await stream.get_final_response()
    assert final.output_parsed == ADA
    assert set(told(mesh)) == {"age name"}
    kept = await client.responses.retrieve(response.id)
    assert kept.text is not None
    assert kept.text.format is not None
    assert kept.text.format.type == "json_schema"


async def test_a_message_becomes_an_object(mesh: GatewayMesh) -> None:
    answers(mesh, ADA.model_dump_json())
    async with anthropic.AsyncAnthropic(base_url=mesh.url, api_key="none", max_retries=0) as client:
        message = await client.messages.parse(
            model="tiny",
            max_tokens=200,
            messages=[{"role": "user", "content": "Who?"}],
            output_format=Person,
        )
    assert message.parsed_output == ADA
    assert set(told(mesh)) == {"age name"}
