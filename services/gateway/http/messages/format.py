"""Writes the answers of the Messages API: messages made of content blocks, whole or as events.

Each event has its name in two places: the SSE field `event`, and `type` in the data. Only one
content block is open at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from pdmesh.services.gateway.request.frontend import Call
from pdmesh.services.gateway.text.choice_text import TextDelta, ToolCallDelta

_encode: Final = msgspec.json.encode

# A JSON object to be encoded, with values of any type.
Json = dict[str, Any]


class MessagesFormat:
    def stream(self, call: Call) -> MessageWriter:
        return MessageWriter(call)

    async def whole(self, call: Call, deltas: Sequence[TextDelta]) -> bytes:
        (delta,) = deltas
        content: list[Json] = []
        if delta.reasoning:
            signature = _signature(call)
            content.append(
                {"type": "thinking", "thinking": delta.reasoning, "signature": signature}
            )
        if delta.text or not (delta.reasoning or delta.calls):  # clients expect at least one block
            content.append({"type": "text", "text": delta.text})
        content += [_tool_use(each) | {"input": _input_of(each.arguments)} for each in delta.calls]
        last = delta.calls[-1].arguments if delta.calls else None
        return _encode(_message(call, content) | _stop_of(delta, last) | {"usage": _usage(call)})


class MessageWriter:
    """Writes the events of one streamed message.

    `_kind` says which block is open: `text`, `thinking`, or the index of a tool call.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        self._has_begun = False
        self._index = -1  # the place of the open block, or of the last one if none is open
        self._kind: str | int | None = None
        self._before = b""  # the bytes before each delta of the open block
        self._arguments: list[str] | None = None  # pieces of the last tool call's arguments
        self._stop: Json = {}

    def opening(self) -> bytes:
        return b""  # the first event has the usage, which is unknown before the first token

    def chunk(self, delta: TextDelta) -> bytes:
        parts: list[bytes] = []
        if not self._has_begun:
            self._has_begun = True
            message = _message(self._call, []) | _NO_STOP | {"usage": _usage(self._call)}
            parts.append(_event("message_start", {"message": message}))
        if delta.reasoning:
            parts.append(self._begun("thinking", {"type": "thinking", **_NO_THOUGHT}))
            parts.append(self._delta(delta.reasoning))
        if delta.text:
            parts.append(self._begun("text", {"type": "text", "text": ""}))
            parts.append(self._delta(delta.text))
        parts += [self._call_piece(call) for call in delta.calls]
        if delta.is_last:
            parts.append(self._last(delta))
        return b"".join(parts)

    async def closing(self) -> bytes:
        told = _event("message_delta", {"delta": self._stop, "usage": _usage(self._call)})
        return told + _event("message_stop", {})

    def _call_piece(self, call: ToolCallDelta) -> bytes:
        began = b""
        if self._kind != call.index:
            began = self._begun(call.index, _tool_use(call) | {"input": {}})
            self._arguments = []
        assert self._arguments is not None
        self._arguments.append(call.arguments)
        return began + self._delta(call.arguments) if call.arguments else began

    def _last(self, delta: TextDelta) -> bytes:
        began = b""
        if self._index < 0:  # clients expect at least one block
            began = self._begun("text", {"type": "text", "text": ""})
        last = None if self._arguments is None else "".join(self._arguments)
        self._stop = _stop_of(delta, last)
        return began + self._close()

    def _begun(self, kind: str | int, block: Json) -> bytes:
        """The beginning of a block, or nothing if a block of this kind is open."""
        if self._kind == kind:
            return b""
        closed = self._close()
        self._index += 1
        self._kind = kind
        name, key = _PIECES.get(kind, ("input_json_delta", "partial_json"))
        self._before = (
            b"event: content_block_delta\n"
            b'data: {"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":'
            % (self._index, name.encode(), key.encode())
        )
        start = {"index": self._index, "content_block": block}
        return closed + _event("content_block_start", start)

    def _delta(self, text: str) -> bytes:
        return b"%b%b}}\n\n" % (self._before, _encode(text))

    def _close(self) -> bytes:
        """The end of the open block, or nothing if none is open."""
        if self._kind is None:
            return b""
        signed = b""
        if self._kind == "thinking":
            delta = {"type": "signature_delta", "signature": _signature(self._call)}
            signed = _event("content_block_delta", {"index": self._index, "delta": delta})
        self._kind = None
        return signed + _event("content_block_stop", {"index": self._index})


_PIECES: Final[Mapping[str | int, tuple[str, str]]] = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
}
_NO_THOUGHT: Final[Json] = {"thinking": "", "signature": ""}
_NO_STOP: Final[Json] = {"stop_reason": None, "stop_sequence": None}


def _event(name: str, data: Json) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _encode({"type": name, **data}))


def _message(call: Call, content: list[Json]) -> Json:
    return {
        "id": "msg_" + call.request_id.removeprefix("req-"),
        "type": "message",
        "role": "assistant",
        "model": call.spec.model,
        "content": content,
    }


def _usage(call: Call) -> Json:
    cached = call.num_cached_tokens
    return {
        "input_tokens": call.num_prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": call.num_completion_tokens,
    }


def _tool_use(call: ToolCallDelta) -> Json:
    return {"type": "tool_use", "id": call.id, "name": call.name}


def _signature(call: Call) -> str:
    """A signature that clients send back with the thinking block. The gateway never checks it."""
    return call.request_id.removeprefix("req-")


def _input_of(arguments: str) -> Json:
    """The arguments as a JSON object. Any other text becomes the object's field `arguments`."""
    found = _decoded(arguments) if arguments else {}
    return found if isinstance(found, dict) else {"arguments": arguments}


def _decoded(arguments: str) -> object:
    try:
        return msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return None


def _stop_of(delta: TextDelta, last_arguments: str | None) -> Json:
    """Why the message ended. `last_arguments` are the arguments of the last tool call, if any.

    If a stop string cut this tool call short, the reason is not `tool_use`: the client must not run
    the call.
    """
    stop = delta.stop_reason if isinstance(delta.stop_reason, str) else None
    if delta.finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if last_arguments is not None and (stop is None or _decoded(last_arguments) is not None):
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": stop}
    return {"stop_reason": "end_turn", "stop_sequence": None}
