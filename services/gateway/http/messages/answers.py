"""The types of the Messages API's answers, for `/openapi.json`."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, UnsetType

from pdmesh.services.gateway.http.answers import Answer

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessagesErrorDetail(Answer):
    """`message` is for people. If a field of the request is invalid, the message names it."""

    type: Literal[
        "invalid_request_error",
        "authentication_error",
        "permission_error",
        "not_found_error",
        "request_too_large",
        "rate_limit_error",
        "overloaded_error",
        "timeout_error",
        "api_error",
    ]
    message: str


class MessagesErrorAnswer(Answer, tag_field="type", tag="error"):
    error: MessagesErrorDetail
    request_id: str | UnsetType = UNSET


class MessagesUsage(Answer):
    """`input_tokens` counts the prompt tokens that were computed.

    `cache_read_input_tokens` counts the prompt tokens whose KV was cached.
    """

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class TextBlock(Answer, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(Answer, tag_field="type", tag="thinking"):
    thinking: str
    signature: str


class ToolUseBlock(Answer, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]  # the arguments, with values of any type


AnswerBlock = TextBlock | ThinkingBlock | ToolUseBlock


class MessageAnswer(Answer, tag_field="type", tag="message"):
    id: str
    role: Literal["assistant"]
    model: str
    content: list[AnswerBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessagesUsage


class MessageStart(Answer, tag_field="type", tag="message_start"):
    message: MessageAnswer


class BlockStart(Answer, tag_field="type", tag="content_block_start"):
    index: int
    content_block: AnswerBlock


class TextPiece(Answer, tag_field="type", tag="text_delta"):
    text: str


class ThinkingPiece(Answer, tag_field="type", tag="thinking_delta"):
    thinking: str


class SignaturePiece(Answer, tag_field="type", tag="signature_delta"):
    signature: str


class InputPiece(Answer, tag_field="type", tag="input_json_delta"):
    partial_json: str


class BlockPiece(Answer, tag_field="type", tag="content_block_delta"):
    index: int
    delta: TextPiece | ThinkingPiece | SignaturePiece | InputPiece


class BlockStop(Answer, tag_field="type", tag="content_block_stop"):
    index: int


class StopDelta(Answer):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Answer, tag_field="type", tag="message_delta"):
    delta: StopDelta
    usage: MessagesUsage


class MessageStop(Answer, tag_field="type", tag="message_stop"): ...


MessageEvent = (
    MessageStart
    | BlockStart
    | BlockPiece
    | BlockStop
    | MessageDelta
    | MessageStop
    | MessagesErrorAnswer
)


class TokenCount(Answer):
    input_tokens: int
