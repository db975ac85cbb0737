"""docs/api.md names every field that the gateway accepts or refuses."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdmesh.errors import MeshError
from pdmesh.services import gateway
from pdmesh.services.gateway.http.messages.schema import MessagesRequest
from pdmesh.services.gateway.http.responses.schema import InputItem, ResponsesRequest
from pdmesh.services.gateway.openai import schema as openai_schema
from pdmesh.services.gateway.openai.chat_messages import ChatMessage
from pdmesh.services.gateway.openai.schema import (
    ChatCompletionRequest,
    CompletionRequest,
    StreamOptions,
)
from pdmesh.v1.inference_service_pb2 import DESCRIPTOR

_DOCS = Path(__file__).parents[4] / "docs"
_TEXT = (_DOCS / "api.md").read_text()
_OTHER_FORMATS = (_DOCS / "responses-messages.md").read_text()


@pytest.mark.parametrize(
    "struct", [ChatCompletionRequest, CompletionRequest, ChatMessage, StreamOptions]
)
def test_every_http_field_is_in_the_page(struct: type) -> None:
    fields: tuple[str, ...] = struct.__struct_fields__  # type: ignore[attr-defined]  # msgspec's
    assert [f for f in fields if f"`{f}`" not in _TEXT] == []


@pytest.mark.parametrize("struct", [MessagesRequest, ResponsesRequest, InputItem])
def test_every_field_of_the_other_formats_is_in_their_page(struct: type) -> None:
    fields: tuple[str, ...] = struct.__struct_fields__  # type: ignore[attr-defined]  # msgspec's
    assert [f for f in fields if f"`{f}`" not in _OTHER_FORMATS] == []


def test_every_refused_field_is_in_the_table_of_refused_fields() -> None:
    refused = _TEXT.partition("### Unsupported fields")[2].partition("### Answers")[0]
    assert [f for f in openai_schema._NEUTRAL if f"`{f}`" not in refused] == []


def test_every_grpc_method_is_in_the_page() -> None:
    methods = DESCRIPTOR.services_by_name["InferenceService"].methods
    assert [m.name for m in methods if f"`{m.name}`" not in _TEXT] == []


def test_every_code_of_the_gateway_is_in_the_table() -> None:
    """The table has the codes with which a request can end. Two codes never leave a gateway."""
    for found in pkgutil.walk_packages(gateway.__path__, f"{gateway.__name__}."):
        # These modules import vLLM.
        if not found.name.endswith((".vllm_parsers", ".parser_requests", ".child")):
            importlib.import_module(found.name)
    inner = {"BAD_MODEL_DIR", "WRONG_TEXT"}
    codes = {
        kind.default_reason
        for kind in _kinds(MeshError)
        if kind.__module__.startswith(gateway.__name__)
    }
    table = _TEXT.partition("### Errors")[2].partition("## gRPC")[0]
    assert sorted(code for code in codes - inner if f"`{code.lower()}`" not in table) == []


def _kinds(kind: type[MeshError]) -> Iterator[type[MeshError]]:
    for each in kind.__subclasses__():
        yield each
        yield from _kinds(each)
