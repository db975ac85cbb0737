"""The messages of a conversation: their structs, their checks, and their form for chat templates.

Chat templates get the same values as from plain vLLM. The arguments of a tool call are an object,
not JSON text. The result of a tool is text. An assistant's reasoning is passed under two names,
`reasoning` and `reasoning_content`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import compress
from operator import attrgetter
from typing import Any, Final, Literal

import msgspec

from pdmesh.errors import InvalidRequest
from pdmesh.services.gateway.openai.json_bounds import MAX_VALUES, SMALL_BYTES
from pdmesh.services.gateway.openai.unknown_fields import Nested
from pdmesh.services.gateway.request.bounds import MAX_MESSAGES, nul_refused
from pdmesh.services.gateway.text.chat_template import ImageMark, Message

MAX_CALLS: Final = 128  # tool calls in one message
_MAX_PARTS: Final = 256
_MAX_ID_CHARS: Final = 256
_STRING: Final = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_SURROGATE: Final = re.compile(r"\\u[dD][89a-fA-F]")  # JSON's escape for a surrogate code point
_BEGINS_A_VALUE: Final = re.compile(r"[\[{,:]")
# Coding agents put a line that begins with this text before their system prompt. The gateway drops
# this line, as plain vLLM does. It differs in each request, so with it no two prompts would share
# cached KV.
BILLING_LINE: Final = "x-anthropic-billing-header"

# The type is Any because a client may send anything here. Only whether it is empty matters.
_Anything = Any


ImageDetail = Literal["auto", "low", "high", "original"]


class ImageUrl(msgspec.Struct, forbid_unknown_fields=True):
    """`detail` has no effect, because the model decides how an image is read."""

    url: str
    detail: ImageDetail | None = None


class ContentPart(msgspec.Struct, forbid_unknown_fields=True):
    """A part of a message's content. Only the types `text` and `image_url` are supported.

    The struct has the fields of other types so that an error names the part, not one of its fields.
    """

    type: str
    text: str | None = None
    image_url: str | ImageUrl | None = None
    input_audio: _Anything = None
    file: _Anything = None
    refusal: _Anything = None


class ImageFile(ContentPart):
    """An image that a request of another API contains as data. A JSON chat never has such a part.

    `format` is the format that the image must have, as in `ImageHeader`. If it is empty, every
    format is allowed.
    """

    base64: str = ""
    data: bytes = b""
    format: str = ""


class CalledFunction(msgspec.Struct, forbid_unknown_fields=True):
    """`arguments` is the text that the model wrote, which usually is a JSON object."""

    name: str
    arguments: str = ""


class ToolCall(msgspec.Struct, forbid_unknown_fields=True):
    """`index` is accepted because some clients send back the deltas of a stream unchanged."""

    function: CalledFunction | None = None
    id: str = ""
    type: str = "function"
    index: int | None = None
    custom: _Anything = None


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True):
    """The role `developer` is the newer name of `system`. Some chat templates support it.

    `reasoning_content` is another name for `reasoning`.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: _Anything = None
    function_call: _Anything = None
    audio: _Anything = None
    annotations: _Anything = None
    tools: _Anything = None


_PART_FIELDS: Final = ("text", "image_url", "input_audio", "file", "refusal")
_UNSUPPORTED: Final = ("refusal", "function_call", "audio", "annotations", "tools")
_read_unsupported: Final = attrgetter(*_UNSUPPORTED)
NESTED_IN_MESSAGES: Final[Nested] = {
    ChatMessage: {"content": ContentPart, "tool_calls": ToolCall},
    ContentPart: {"image_url": ImageUrl},
    ToolCall: {"function": CalledFunction},
}


def check_messages(messages: Sequence[ChatMessage]) -> None:
    """Raises InvalidRequest with the field."""
    if not messages:
        raise InvalidRequest("messages is empty", field="messages")
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequest(f"at most {MAX_MESSAGES} messages are allowed", field="messages")
    called_ids: set[str] = set()
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if any(values := _read_unsupported(message)):
            raise _unsupported(f"{where}.{next(compress(_UNSUPPORTED, values))}")
        if message.tool_calls:
            _check_calls(message, where)
            called_ids.update(call.id for call in message.tool_calls)
        if message.role == "tool":
            _check_result(message, where, called_ids)
        if message.content is None and message.role != "assistant":
            raise InvalidRequest(f"{where}.content is missing", field=f"{where}.content")
        if isinstance(message.content, list):
            _check_parts(message.content, where, takes_images=message.role == "user")
    if called_ids:
        _check_work(messages)


def messages_of(messages: Sequence[ChatMessage], image_mark: str = "") -> list[Message]:
    """The messages in the form for chat templates. Content parts become a list of their texts.

    `image_mark` is the text that stands for an image. Raises InvalidRequest.
    """
    plain: list[Message] = []
    for index, message in enumerate(messages):
        content: str | Sequence[str] = message.content if isinstance(message.content, str) else ()
        if isinstance(message.content, list):
            content = [
                ImageMark(image_mark) if part.type == "image_url" else part.text or ""
                for part in message.content
            ]
        if message.role == "system" and BILLING_LINE in str(content):
            content = _texts_without_billing_line(content)
        given: dict[str, object] = {"role": message.role, "content": content}
        if message.role == "assistant":
            if message.tool_calls:
                where = f"messages[{index}].tool_calls"
                given["tool_calls"] = [
                    _call_of(call, f"{where}[{at}]") for at, call in enumerate(message.tool_calls)
                ]
            reasoning = message.reasoning
            if reasoning is None:
                reasoning = message.reasoning_content
            if reasoning is not None:
                given["reasoning"] = given["reasoning_content"] = reasoning
        elif message.role == "tool":
            given["tool_call_id"] = message.tool_call_id
        if message.name:
            given["name"] = message.name
        plain.append(given)
    return plain


def without_billing_line(message: ChatMessage) -> ChatMessage:
    """The message as all requests of its chat repeat it. The billing line differs in each."""
    content = message.content
    if message.role != "system" or BILLING_LINE not in str(content):
        return message
    if isinstance(content, str):
        text = "".join(_texts_without_billing_line(content))
        return msgspec.structs.replace(message, content=text)
    texts = _texts_without_billing_line([part.text or "" for part in content or ()])
    return msgspec.structs.replace(message, content=[ContentPart("text", t) for t in texts])


def _call_of(call: ToolCall, where: str) -> dict[str, object]:
    assert call.function is not None
    arguments = _arguments_of(call.function.arguments, f"{where}.function.arguments")
    function = {"arguments": arguments, "name": call.function.name}
    return {"id": call.id, "function": function, "type": call.type}


def _arguments_of(text: str, field: str) -> dict[str, Any]:
    """The arguments of a tool call, or an empty object if the text is not a JSON object.

    A model may write anything, and the conversation must be able to continue after that. Raises
    InvalidRequest if the text is nested too deeply or contains U+0000.
    """
    try:
        found = json.loads(text) if text else {}
    except RecursionError as exc:
        raise InvalidRequest(f"{field} is nested too deeply", field=field) from exc
    except ValueError:
        return {}
    if "\\u0000" in text:
        raise nul_refused(field)
    if _SURROGATE.search(text):
        found = json.loads(_in_characters(json.dumps(found, ensure_ascii=False)))
    return found if isinstance(found, dict) else {}


def _in_characters(text: str) -> str:
    """The text with replacements for halves of characters, which no tokenizer accepts."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _texts_without_billing_line(content: str | Sequence[str]) -> list[str]:
    texts = [content] if isinstance(content, str) else content
    shown = [t.partition("\n")[2] if t.startswith(BILLING_LINE) else t for t in texts]
    return [new for new, old in zip(shown, texts, strict=True) if new or new == old]


def _check_calls(message: ChatMessage, where: str) -> None:
    calls = message.tool_calls or ()
    where = f"{where}.tool_calls"
    if message.role != "assistant":
        raise InvalidRequest("only an assistant's message has tool_calls", field=where)
    if len(calls) > MAX_CALLS:
        raise InvalidRequest(
            f"at most {MAX_CALLS} tool calls are allowed in a message", field=where
        )
    for index, call in enumerate(calls):
        if call.type != "function":
            raise _unsupported(f"{where}[{index}].type")
        if call.function is None:
            raise _missing(f"{where}[{index}].function")
        for name, value in (("id", call.id), ("function.name", call.function.name)):
            _check_name(value, f"{where}[{index}].{name}")


def _check_result(message: ChatMessage, where: str, called_ids: set[str]) -> None:
    field = f"{where}.tool_call_id"
    if not message.tool_call_id:
        raise _missing(field)
    if message.tool_call_id not in called_ids:
        raise InvalidRequest(f"{field} is not the id of an earlier tool call", field=field)


def _check_name(name: str, field: str) -> None:
    if not name:
        raise _missing(field)
    if len(name) > _MAX_ID_CHARS:
        raise InvalidRequest(f"{field} must have at most {_MAX_ID_CHARS} characters", field=field)


def _check_work(messages: Sequence[ChatMessage]) -> None:
    """Limit the number of values in the arguments of all tool calls.

    The arguments are parsed on the event loop.
    """
    calls = [call for message in messages for call in message.tool_calls or ()]
    texts = [call.function.arguments for call in calls if call.function]
    if sum(map(len, texts)) <= SMALL_BYTES:
        return
    num_values = 0
    for text in texts:
        num_values += len(_BEGINS_A_VALUE.findall(_STRING.sub("", text)))
        if num_values > MAX_VALUES:
            message = f"the arguments of the tool calls hold more than {MAX_VALUES} values"
            raise InvalidRequest(message, field="messages")


def _check_parts(parts: Sequence[ContentPart], where: str, *, takes_images: bool) -> None:
    if len(parts) > _MAX_PARTS:
        raise InvalidRequest(f"at most {_MAX_PARTS} parts are allowed", field=f"{where}.content")
    for index, part in enumerate(parts):
        if part.type == "text" and part.text is None:
            raise _missing(f"{where}.content[{index}].text")
        if part.type != "text" and not (part.type == "image_url" and takes_images):
            known = "text and image_url are" if takes_images else "only text is"
            raise InvalidRequest(
                f"content parts of type {part.type[:32]} are not supported here; {known}",
                reason="UNSUPPORTED_FIELD",
                field=f"{where}.content[{index}]",
            )
        check_alone(part, part.type, _PART_FIELDS, f"{where}.content[{index}]")


def check_alone(part: msgspec.Struct, own: str, fields: Sequence[str], where: str) -> None:
    """Refuse a part that also has content of another type, which would be left out of the prompt.

    `fields` are the fields that hold the content of all types of parts. `own` is the field for the
    type of this part. Raises InvalidRequest.
    """
    for name in fields:
        if name != own and getattr(part, name):
            field = f"{where}.{name}"
            message = f"{field} is not supported in a part that has {own}"
            raise InvalidRequest(message, reason="UNSUPPORTED_FIELD", field=field)


def _unsupported(field: str) -> InvalidRequest:
    return InvalidRequest(f"{field} is not supported", reason="UNSUPPORTED_FIELD", field=field)


def _missing(field: str) -> InvalidRequest:
    return InvalidRequest(f"missing field: {field}", reason="MISSING_FIELD", field=field)
