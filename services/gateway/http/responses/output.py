"""The output items of a response, and the events that report them piece by piece.

An item is a piece of reasoning, a message or a tool call. Only one item is open at a time. An item
is closed before the next item begins, or at the end of the response.
"""

from __future__ import annotations

import itertools
from typing import Any, Final

import msgspec

_encode: Final = msgspec.json.encode

# A JSON object to be encoded, with values of any type.
Json = dict[str, Any]
_TEXT: Final = "output_text"
_REASONING: Final = "reasoning_text"


def event(name: str, data: Json, sequence_number: int) -> bytes:
    body = _encode({"type": name, **data, "sequence_number": sequence_number})
    return b"event: %b\ndata: %b\n\n" % (name.encode(), body)


class OutputItems:
    """`items` has the closed items. Without `tells`, no events are written."""

    def __init__(self, response_id: str, *, tells: bool = True) -> None:
        self.items: list[Json] = []
        self._tells = tells
        self._numbers = itertools.count()
        self._suffix = response_id.removeprefix("resp_")
        self._open: Json | None = None
        self._kind = ""
        self._pieces: list[str] = []
        self._logprobs: list[Json] = []
        self._before = b""  # the bytes before each delta of a text

    def event(self, name: str, data: Json) -> bytes:
        if not self._tells:
            return b""
        return event(name, data, next(self._numbers))

    # --- adding content --------------------------------------------------------------------------

    def text(self, text: str, logprobs: list[Json]) -> bytes:
        began = b"" if self._kind == _TEXT else self._begin_part(_TEXT)
        self._pieces.append(text)
        self._logprobs += logprobs
        if not self._tells or not (text or logprobs):
            return began
        shown = _encode(logprobs) if logprobs else b"[]"
        return b'%b%b%b,"logprobs":%b,"sequence_number":%d}\n\n' % (
            began,
            self._before,
            _encode(text),
            shown,
            next(self._numbers),
        )

    def reasoning(self, text: str) -> bytes:
        began = b"" if self._kind == _REASONING else self._begin_part(_REASONING)
        self._pieces.append(text)
        if not self._tells:
            return began
        return b'%b%b%b,"sequence_number":%d}\n\n' % (
            began,
            self._before,
            _encode(text),
            next(self._numbers),
        )

    def call(self, index: int, call_id: str, name: str, arguments: str) -> bytes:
        """Add a piece of the tool call `index`.

        The first piece has the id and the name of the call.
        """
        kind = f"call {index}"
        began = b""
        if self._kind != kind:
            item: Json = {"type": "function_call", "call_id": call_id, "name": name}
            began = self._begin(kind, "fc", item | {"arguments": ""})
        self._pieces.append(arguments)
        if not arguments:
            return began
        return began + self.event(
            "response.function_call_arguments.delta", {**self._place(), "delta": arguments}
        )

    def close(self, status: str = "completed") -> bytes:
        """Close the open item, if there is one."""
        item, kind, whole = self._open, self._kind, "".join(self._pieces)
        if item is None:
            return b""
        place = self._place()
        logprobs = self._logprobs
        self._open, self._kind, self._pieces, self._logprobs = None, "", [], []
        if item["type"] == "function_call":
            item["arguments"] = whole
            done = {**place, "name": item["name"], "arguments": whole}
            told = self.event("response.function_call_arguments.done", done)
        else:
            part = _part(kind, whole, logprobs)
            item["content"] = [part]
            within: Json = {**place, "content_index": 0}
            further = {"logprobs": logprobs} if kind == _TEXT else {}
            told = self.event(f"response.{kind}.done", {**within, "text": whole, **further})
            told += self.event("response.content_part.done", {**within, "part": part})
        item["status"] = status
        self.items.append(item)
        index = {"output_index": len(self.items) - 1}
        return told + self.event("response.output_item.done", {**index, "item": item})

    # --- beginning an item -----------------------------------------------------------------------

    def _begin_part(self, kind: str) -> bytes:
        if kind == _TEXT:
            began = self._begin(
                kind, "msg", {"type": "message", "role": "assistant", "content": []}
            )
        else:
            began = self._begin(kind, "rs", {"type": "reasoning", "summary": [], "content": []})
        within: Json = {**self._place(), "content_index": 0}
        name = f"response.{kind}.delta"
        head = _encode({"type": name, **within})[:-1]
        self._before = b'event: %b\ndata: %b,"delta":' % (name.encode(), head)
        part = _part(kind, "", [])
        return began + self.event("response.content_part.added", {**within, "part": part})

    def _begin(self, kind: str, prefix: str, item: Json) -> bytes:
        closed = self.close()
        number = len(self.items)
        self._kind = kind
        self._open = {"id": f"{prefix}_{self._suffix}{number:04x}", **item, "status": "in_progress"}
        added = {"output_index": number, "item": self._open}
        return closed + self.event("response.output_item.added", added)

    def _place(self) -> Json:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self.items)}


def _part(kind: str, text: str, logprobs: list[Json]) -> Json:
    if kind == _REASONING:
        return {"type": kind, "text": text}
    return {"type": kind, "text": text, "annotations": [], "logprobs": logprobs}
