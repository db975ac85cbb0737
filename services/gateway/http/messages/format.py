"""Writes the answers of the Messages API: a message of content blocks, whole or as events.

An event is named twice, in its SSE field and in its data. One block is open at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from pdmesh.services.gateway.request.frontend import Call
from pdmesh.services.gateway.text.choice_text import TextDelta

_encode: Final = msgspec.json.encode

# Any: JSON objects on their way out.
Json = dict[str, Any]


class MessagesFormat:
    def stream(self, call: Call) -> MessageWriter:
        return MessageWriter(call)

    async def whole(self, call: Call, deltas: Sequence[TextDelta]) -> bytes:
        (delta,) = deltas
        content: list[Json] = [{"type": "text", "text": delta.text}]
        return _encode(_message(call, content) | _stop_of(delta) | {"usage": _usage(call)})


class MessageWriter:
    """The events of one streamed message."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._index = -1  # of the block that is open, or was last
        self._is_open = False
        self._before_text = b""
        self._stop: Json = {}

    def opening(self) -> bytes:
        return b""  # the usage is known once there is a token

    def chunk(self, delta: TextDelta) -> bytes:
        parts = [] if self._index >= 0 or self._is_open else [self._start()]
        if delta.text or delta.is_last:
            parts.append(self._text(delta.text))
        if delta.is_last:
            parts.append(self._close())
            self._stop = _stop_of(delta)
        return b"".join(parts)

    async def closing(self) -> bytes:
        return _event("message_delta", {"delta": self._stop, "usage": _usage(self._call)}) + _event(
            "message_stop", {}
        )

    def _start(self) -> bytes:
        message = _message(self._call, []) | _NO_STOP | {"usage": _usage(self._call)}
        return _event("message_start", {"message": message})

    def _text(self, text: str) -> bytes:
        started = b"" if self._is_open else self._open({"type": "text", "text": ""})
        if not text:
            return started
        return b"%b%b%b}}\n\n" % (started, self._before_text, _encode(text))

    def _open(self, block: Json) -> bytes:
        self._index += 1
        self._is_open = True
        self._before_text = (
            b"event: content_block_delta\n"
            b'data: {"type":"content_block_delta","index":%d,"delta":{"type":"text_delta","text":'
            % self._index
        )
        return _event("content_block_start", {"index": self._index, "content_block": block})

    def _close(self) -> bytes:
        self._is_open = False
        return _event("content_block_stop", {"index": self._index})


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


def _stop_of(delta: TextDelta) -> Json:
    if delta.finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if isinstance(delta.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": delta.stop_reason}
    return {"stop_reason": "end_turn", "stop_sequence": None}
