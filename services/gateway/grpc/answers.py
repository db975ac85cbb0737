"""Turns the deltas of a call into messages of the gRPC API.

A call is one request of a client, with one or more choices. A delta is a new piece of one choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from msgspec.structs import replace

from pdmesh.services.gateway.request.frontend import Call
from pdmesh.services.gateway.text.choice_text import TextDelta, ToolCallDelta
from pdmesh.v1 import inference_service_pb2 as pb
from pdmesh.v1.common_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_REPETITION,
    FINISH_REASON_STOP,
    FINISH_REASON_TOOL_CALLS,
    FinishReason,
    StopReason,
    Usage,
)

_REASONS: Final[dict[str | None, FinishReason.ValueType]] = {
    "stop": FINISH_REASON_STOP,
    "length": FINISH_REASON_LENGTH,
    "tool_calls": FINISH_REASON_TOOL_CALLS,
    "repetition": FINISH_REASON_REPETITION,
}


class _Parts:
    """Makes the messages of one stream. With `counts_each`, each message has the usage so far."""

    def __init__(self, call: Call, *, counts_each: bool) -> None:
        self._call = call
        self._counts_each = counts_each
        tells_prompt = call.spec.has_token_ids or call.spec.echoed
        # The choices whose prompt must still be sent. Empty if the answer has no prompts.
        self._untold = set(range(len(call.generations))) if tells_prompt else set[int]()

    def _is_first(self, delta: TextDelta) -> bool:
        """Whether this is the first message of a choice whose prompt must be sent."""
        if delta.index not in self._untold:
            return False
        self._untold.discard(delta.index)
        return True

    def _finish(
        self,
        response: pb.GenerateStreamResponse | pb.ChatStreamResponse,
        delta: TextDelta,
        *,
        is_end: bool,
    ) -> None:
        if delta.is_last:
            response.finish_reason = _REASONS[delta.finish_reason]
        if is_end or self._counts_each:
            response.usage.CopyFrom(_usage(self._call))


class GenerateParts(_Parts):
    def part(self, delta: TextDelta, *, is_end: bool) -> pb.GenerateStreamResponse | None:
        """The message, or None if there is nothing to send yet."""
        if not (delta.is_last or delta.text or delta.token_ids):
            return None
        call = self._call
        shown = _shown(call, delta)
        response = pb.GenerateStreamResponse(
            request_id=call.request_id,
            index=delta.index,
            text=shown.text,
            token_ids=shown.token_ids,
            logprobs=shown.logprobs,
            prompt_logprobs=delta.prompt_logprobs,
            stop_reason=_stop_reason(delta),
        )
        if self._is_first(delta):
            response.text = _echo(call, delta.index) + response.text
            response.prompt_token_ids.extend(_told_prompt(call, delta.index))
        self._finish(response, delta, is_end=is_end)
        return response


class ChatParts(_Parts):
    def part(self, delta: TextDelta, *, is_end: bool) -> pb.ChatStreamResponse | None:
        """The message, or None if there is nothing to send yet."""
        call, has_token_ids = self._call, self._call.spec.has_token_ids
        is_counted = self._counts_each or has_token_ids or delta.logprobs or delta.prompt_logprobs
        is_said = delta.text or delta.reasoning or delta.calls
        if not (delta.is_last or is_said or (is_counted and delta.token_ids)):
            return None
        response = pb.ChatStreamResponse(
            request_id=call.request_id,
            index=delta.index,
            content=delta.text,
            logprobs=delta.logprobs,
            prompt_logprobs=delta.prompt_logprobs,
            stop_reason=_stop_reason(delta),
        )
        if delta.reasoning:
            response.reasoning = delta.reasoning
        if delta.calls:
            response.tool_calls.extend(map(_call_delta, delta.calls))
        if has_token_ids:
            response.token_ids.extend(delta.token_ids)
            if self._is_first(delta):
                response.prompt_token_ids.extend(_told_prompt(call, delta.index))
        self._finish(response, delta, is_end=is_end)
        return response


def generate_response(call: Call, deltas: Sequence[TextDelta]) -> pb.GenerateResponse:
    """The answer to a call that is not streamed.

    `deltas` has one delta for each choice, with all of its text.
    """
    choices = [
        _choice(
            delta,
            text=_echo(call, delta.index) + shown.text,
            token_ids=shown.token_ids,
            logprobs=shown.logprobs,
            prompt_token_ids=_told_prompt(call, delta.index),
        )
        for delta in deltas
        for shown in (_shown(call, delta),)
    ]
    first = choices[0]
    return pb.GenerateResponse(
        request_id=call.request_id,
        model=call.spec.model,
        text=first.text,
        token_ids=first.token_ids,
        finish_reason=first.finish_reason,
        stop_reason=_of(first, "stop_reason"),
        logprobs=first.logprobs,
        prompt_logprobs=_of(first, "prompt_logprobs"),
        prompt_token_ids=first.prompt_token_ids,
        usage=_usage(call),
        other_choices=choices[1:],
    )


def chat_response(call: Call, deltas: Sequence[TextDelta]) -> pb.ChatResponse:
    """The answer to a call that is not streamed.

    `deltas` has one delta for each choice, with all of its text.
    """
    choices = [
        _choice(
            delta,
            text=delta.text,
            token_ids=delta.token_ids if call.spec.has_token_ids else (),
            logprobs=delta.logprobs,
            reasoning=delta.reasoning,
            tool_calls=map(_called, delta.calls),
        )
        for delta in deltas
    ]
    first = choices[0]
    return pb.ChatResponse(
        request_id=call.request_id,
        model=call.spec.model,
        message=pb.ChatMessage(
            role="assistant",
            content=first.text,
            reasoning=first.reasoning,
            tool_calls=first.tool_calls,
        ),
        finish_reason=first.finish_reason,
        stop_reason=_of(first, "stop_reason"),
        logprobs=first.logprobs,
        prompt_logprobs=_of(first, "prompt_logprobs"),
        token_ids=first.token_ids,
        prompt_token_ids=_told_prompt(call, 0),
        usage=_usage(call),
        other_choices=choices[1:],
    )


def _choice(delta: TextDelta, **fields: Any) -> pb.Choice:  # fields of various types
    return pb.Choice(
        index=delta.index,
        finish_reason=_REASONS[delta.finish_reason],
        stop_reason=_stop_reason(delta),
        prompt_logprobs=delta.prompt_logprobs,
        **fields,
    )


def _call_delta(call: ToolCallDelta) -> pb.ToolCallDelta:
    return pb.ToolCallDelta(index=call.index, id=call.id, function=_function(call))


def _called(call: ToolCallDelta) -> pb.ToolCall:
    return pb.ToolCall(id=call.id, function=_function(call))


def _function(call: ToolCallDelta) -> pb.FunctionCall:
    return pb.FunctionCall(name=call.name, arguments=call.arguments)


def _shown(call: Call, delta: TextDelta) -> TextDelta:
    """The delta, or an empty one if the call asks only for an echo of the prompt.

    For such a call, the engine draws one token, because it cannot draw none.
    """
    if not call.spec.is_echo_alone:
        return delta
    return replace(delta, text="", token_ids=(), logprobs=())


def _echo(call: Call, index: int) -> str:
    """The prompt's text if the choice begins with the prompt, else empty."""
    return call.spec.echoed[index // call.spec.n] if call.spec.echoed else ""


def _told_prompt(call: Call, index: int) -> Sequence[int]:
    return call.generations[index].prompt.tokens if call.spec.has_token_ids else ()


def _stop_reason(delta: TextDelta) -> StopReason | None:
    if delta.finish_reason == "repetition":
        return None
    match delta.stop_reason:
        case None:
            return None
        case int():
            return StopReason(token_id=delta.stop_reason)
        case str():
            return StopReason(text=delta.stop_reason)


def _of(choice: pb.Choice, field: str) -> Any:
    """The submessage `field` of the choice, or None if it is unset.

    A field of the answer that gets None stays unset.
    """
    return getattr(choice, field) if choice.HasField(field) else None  # type: ignore[arg-type]


def _usage(call: Call) -> Usage:
    return Usage(
        num_prompt_tokens=call.num_prompt_tokens,
        num_completion_tokens=call.num_completion_tokens,
        num_cached_tokens=call.num_cached_tokens,
        num_reasoning_tokens=call.num_reasoning_tokens,
    )
