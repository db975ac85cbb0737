"""Writes answers of the Responses API, whole or as numbered events in the documented order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from pdmesh.errors import MeshError
from pdmesh.services.gateway.http.exchange import HttpExchange
from pdmesh.services.gateway.http.logprobs import LogprobWriter
from pdmesh.services.gateway.http.responses.output import OutputItems
from pdmesh.services.gateway.http.responses.schema import ResponsesRequest
from pdmesh.services.gateway.http.responses.store import KeepOutcome
from pdmesh.services.gateway.http.responses.text_logprobs import TextLogprobs
from pdmesh.services.gateway.http.serving.answering import MAX_LOGPROBS_HERE
from pdmesh.services.gateway.request.frontend import Call
from pdmesh.services.gateway.text.choice_text import TextDelta

_encode: Final = msgspec.json.encode

# A JSON object to be encoded, with values of any type.
Json = dict[str, Any]
Keep = Callable[[Json], Awaitable[KeepOutcome]]


@dataclass(frozen=True, slots=True)
class ResponsesFormat:
    """`keep` stores a response for later requests.

    `keep` is None if the client declined this or if the gateway keeps no responses.
    """

    request: ResponsesRequest
    exchange: HttpExchange
    keep: Keep | None

    def stream(self, call: Call) -> ResponseWriter:
        writer = ResponseWriter(call, self)
        # From now on, an error ends the stream with the event `response.failed`.
        self.exchange.errors = replace(self.exchange.errors, event=writer.failed)
        return writer

    async def whole(self, call: Call, deltas: Sequence[TextDelta]) -> bytes:
        writer = ResponseWriter(call, self, tells=False)
        return _encode(await writer.kept(await writer.whole(deltas)))


class ResponseWriter:
    """Builds one response from its deltas, and writes the events that report each delta."""

    def __init__(self, call: Call, written: ResponsesFormat, *, tells: bool = True) -> None:
        self._call = call
        self._keep = written.keep
        self._response = _begun(call, written.request, is_kept=written.keep is not None)
        self._items = OutputItems(self._response["id"], tells=tells)
        self._logprobs: LogprobWriter | None = None
        self._of_text = TextLogprobs() if call.spec.parsing is not None else None
        if call.spec.sampling.num_logprobs is not None:
            prompt = call.generations[0].prompt.tokens
            self._logprobs = LogprobWriter(call.spec.tokenizer, prompt)

    def opening(self) -> bytes:
        begun = {"response": self._response}
        return b"".join(
            self._items.event(name, begun) for name in ("response.created", "response.in_progress")
        )

    def chunk(self, delta: TextDelta) -> bytes:
        logprobs: list[Json] = []
        if self._logprobs is not None:
            logprobs = self._logprobs.chat(delta.logprobs)["content"]
            if self._of_text is not None:
                logprobs = self._of_text.of(delta, logprobs)
        parts: list[bytes] = []
        if delta.reasoning:
            parts.append(self._items.reasoning(delta.reasoning))
        if delta.text or logprobs:
            parts.append(self._items.text(delta.text, logprobs))
        parts += [self._items.call(c.index, c.id, c.name, c.arguments) for c in delta.calls]
        if delta.is_last:
            parts.append(self._last(delta))
        return b"".join(parts)

    def _last(self, delta: TextDelta) -> bytes:
        status = "incomplete" if delta.finish_reason == "length" else "completed"
        if status == "incomplete":
            self._response["incomplete_details"] = {"reason": "max_output_tokens"}
        self._response["status"] = status
        closed = self._items.close(status)
        if not self._items.items:  # clients expect at least one item
            closed = self._items.text("", []) + self._items.close(status)
        return closed

    async def closing(self) -> bytes:
        response = await self.kept(self._ended())
        return self._items.event(f"response.{response['status']}", {"response": response})

    def _ended(self) -> Json:
        response = self._response
        response["completed_at"] = int(time.time())
        response["output"] = self._items.items
        response["usage"] = _usage(self._call)
        return response

    async def kept(self, response: Json) -> Json:
        """Store the response, unless `keep` is None. Its field `store` says whether it is kept."""
        if self._keep is not None:
            response["store"] = await self._keep(response) is KeepOutcome.KEPT
        return response

    def failed(self, error: MeshError) -> bytes:
        closed = self._items.close("incomplete")
        response = self.ended_badly("failed", error) | {"store": False}
        return closed + self._items.event("response.failed", {"response": response})

    # --- in the background -----------------------------------------------------------------------

    def begun(self) -> Json:
        """The response in the form that other requests see while it is being made."""
        self._response["background"] = True
        return self._response

    async def whole(self, deltas: Sequence[TextDelta]) -> Json:
        """The whole response at once. `deltas` has one item, with the whole answer."""
        (delta,) = deltas
        if delta.num_logprobs <= MAX_LOGPROBS_HERE:
            self.chunk(delta)
        else:
            await asyncio.to_thread(self.chunk, delta)
        return self._ended()

    def ended_badly(self, status: str, error: MeshError | None = None) -> Json:
        if error is not None:
            told = {"code": error.reason.lower(), "message": error.message}
            self._response["error"] = told
        self._response |= {
            "status": status, "output": self._items.items, "usage": _usage(self._call)
        }  # fmt: skip
        return self._response

    def too_large(self) -> Json:
        """The failure that replaces a response whose output is too large."""
        error = MeshError("the response is too large to be kept", reason="RESPONSE_TOO_LARGE")
        bare: Json = {"output": [], "completed_at": None, "incomplete_details": None}
        return self.ended_badly("failed", error) | bare


def response_id_of(request_id: str) -> str:
    return "resp_" + request_id.removeprefix("req-")


def _begun(call: Call, request: ResponsesRequest, *, is_kept: bool) -> Json:
    sampling = call.spec.sampling
    text = request.text
    reasoning = request.reasoning
    return {
        "id": response_id_of(call.request_id),
        "object": "response",
        "created_at": call.created,
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "model": call.spec.model,
        "output": [],
        "usage": None,
        "store": is_kept,
        "previous_response_id": request.previous_response_id,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "reasoning": {"effort": reasoning.effort if reasoning else None, "summary": None},
        "service_tier": "default",
        "temperature": sampling.temperature,
        "text": {"format": (text.format if text else None) or {"type": "text"}},
        "tool_choice": "auto" if request.tool_choice is None else request.tool_choice,
        "tools": request.tools or [],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "user": request.user,
    }


def _usage(call: Call) -> Json:
    prompt, output = call.num_prompt_tokens, call.num_completion_tokens
    return {
        "input_tokens": prompt,
        "input_tokens_details": {
            "cached_tokens": call.num_cached_tokens, "cache_write_tokens": 0,
        },
        "output_tokens": output,
        "output_tokens_details": {"reasoning_tokens": call.num_reasoning_tokens},
        "total_tokens": prompt + output,
    }  # fmt: skip
