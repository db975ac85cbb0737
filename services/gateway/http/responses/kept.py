"""A kept response, and the conversation that a later response may continue."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from pdmesh.errors import MeshError
from pdmesh.services.gateway.http.responses.schema import InputItem, ItemPart
from pdmesh.services.gateway.http.responses.store import ResponseStore

_ID: Final = re.compile(r"resp_[0-9a-f]{24}")
_encode: Final = msgspec.json.encode

# A JSON object to be encoded, with values of any type.
Json = dict[str, Any]


class ResponseNotFound(MeshError):
    grpc_code, http_status, default_reason = "NOT_FOUND", 404, "RESPONSE_NOT_FOUND"


class KeptResponse(msgspec.Struct):
    """`input` has all items before the output, including the items of earlier responses."""

    response: msgspec.Raw
    input: list[msgspec.Raw]
    output: list[msgspec.Raw]


_kept: Final = msgspec.json.Decoder(KeptResponse)
_item: Final = msgspec.json.Decoder(InputItem)


def items_of(kept: KeptResponse) -> list[InputItem]:
    """The conversation up to the end of the response."""
    return [_bare(_item.decode(raw)) for raw in (*kept.input, *kept.output)]


class _State(msgspec.Struct):
    status: str
    background: bool


_state: Final = msgspec.json.Decoder(_State)


def is_background(kept: KeptResponse) -> bool:
    return _state.decode(kept.response).background


def is_being_made(kept: KeptResponse) -> bool:
    return _state.decode(kept.response).status == "in_progress"


def abandoned(kept: KeptResponse) -> KeptResponse:
    """The response with the status `failed`, because no gateway is making it any more."""
    response: Json = msgspec.json.decode(kept.response)
    message = "the gateway that made this response is gone, or could not keep it"
    error = {"code": "server_error", "message": message}
    failed = _encode(response | {"status": "failed", "error": error})
    return KeptResponse(msgspec.Raw(failed), kept.input, kept.output)


def record_of(items: Sequence[InputItem], response: Json) -> bytes:
    return _encode({"response": response, "input": items, "output": response["output"]})


async def load_kept(
    store: ResponseStore, tenant: str, response_id: str, field: str | None = None
) -> KeptResponse:
    """Raises ResponseNotFound, Unavailable."""
    found = None
    if store.keeps and _ID.fullmatch(response_id):
        found = await store.load(tenant, response_id)
    if found is None:
        raise not_found(field)
    return _kept.decode(found)


async def forget_kept(store: ResponseStore, tenant: str, response_id: str) -> None:
    """Raises ResponseNotFound, Unavailable."""
    is_asked = store.keeps and _ID.fullmatch(response_id)
    if not (is_asked and await store.forget(tenant, response_id)):
        raise not_found()


def not_found(field: str | None = None) -> ResponseNotFound:
    return ResponseNotFound("no such response is kept", field=field)


def input_items(asked: str | Sequence[InputItem]) -> list[InputItem]:
    """The items of a request in the stored form: with ids, and with messages as lists of parts."""
    if isinstance(asked, str):
        asked = [InputItem(type="message", role="user", content=asked)]
    return [_as_kept(item) for item in asked]


def _as_kept(item: InputItem) -> InputItem:
    kind, content = item.type or "message", item.content
    if kind == "message" and isinstance(content, str):
        part = "output_text" if item.role == "assistant" else "input_text"
        content = [ItemPart(type=part, text=content)]
    given = item.id or f"{_PREFIXES.get(kind, 'item')}_{secrets.token_hex(12)}"
    return _bare(msgspec.structs.replace(item, type=kind, id=given, content=content))


def _bare(item: InputItem) -> InputItem:
    """The item without the fields that no later response reads, such as annotations and logprobs.

    Such fields may be long in every response of a chain, and no limit for one request bounds their
    sum.
    """
    bare = {
        name: list(map(_bare_part, parts))
        for name in ("content", "summary", "output")
        if isinstance(parts := getattr(item, name), list)
    }
    return msgspec.structs.replace(item, **bare)


def _bare_part(part: ItemPart) -> ItemPart:
    # Clients expect this field in output_text.
    annotations: list[Json] | None = [] if part.type == "output_text" else None
    bare = ItemPart(type=part.type, text=part.text, refusal=part.refusal, annotations=annotations)
    if part.type == "input_image":
        bare.image_url, bare.detail = part.image_url, part.detail
    return bare


_PREFIXES: Final = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
}
