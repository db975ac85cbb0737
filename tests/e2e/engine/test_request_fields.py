"""The table of vLLM's request fields in docs/api.md has all fields of the installed vLLM."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest

from pdmesh.services.gateway.http.messages.schema import MessagesRequest
from pdmesh.services.gateway.http.responses.schema import ResponsesRequest
from tests.unit.gateway.openai.test_vllm_fields import told

pytestmark = pytest.mark.vllm


def fields_of(file: str, name: str) -> set[str]:
    """The fields of a class in vLLM's source, without its import, which takes half a minute."""
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations
    tree = ast.parse((Path(spec.submodule_search_locations[0]) / file).read_text())
    (found,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name)
    annotated = [n.target for n in found.body if isinstance(n, ast.AnnAssign)]
    names = {target.id for target in annotated if isinstance(target, ast.Name)}
    return {name for name in names if not name.startswith("_")}


@pytest.mark.parametrize(
    ("file", "name", "what"),
    [
        ("entrypoints/openai/chat_completion/protocol.py", "ChatCompletionRequest", "chat"),
        ("entrypoints/openai/completion/protocol.py", "CompletionRequest", "completion"),
    ],
)
def test_each_field_of_a_request_is_in_one_row(file: str, name: str, what: str) -> None:
    rows = (told(f"{what}: {row}") for row in ("taken", "refused", "ignored"))
    assert set.union(*rows) == fields_of(file, name)


@pytest.mark.parametrize(
    ("file", "name", "ours"),
    [
        ("entrypoints/openai/responses/protocol.py", "ResponsesRequest", ResponsesRequest),
        ("entrypoints/anthropic/protocol.py", "AnthropicMessagesRequest", MessagesRequest),
    ],
)
def test_other_formats_know_each_field_too(
    file: str, name: str, ours: type[ResponsesRequest | MessagesRequest]
) -> None:
    unknown = fields_of(file, name) - set(ours.__struct_fields__)
    assert unknown == {"return_mm_kwargs"}, "it would only add to an answer"


def test_each_sampling_parameter_can_be_asked_for_or_is_vllms_own() -> None:
    rows = ("chat: taken", "chat: refused", "chat: ignored", "completion: taken")
    known = set.union(*map(told, (*rows, "not in a request")))
    assert fields_of("sampling_params.py", "SamplingParams") <= known
