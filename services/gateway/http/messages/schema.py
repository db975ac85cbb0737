"""The requests of Anthropic's Messages API that the gateway accepts, as typed structs.

A field that would change the answer but is not supported is refused. Hints that have no effect in
this gateway are accepted. The module `translation` makes a chat from each request. The checks of
this chat bound lengths, depths and counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final, Literal

import msgspec

from pdmesh.errors import InvalidRequest
from pdmesh.services.gateway.openai.json_body import decoded
from pdmesh.services.gateway.openai.schema import ReasoningEffort, Session
from pdmesh.services.gateway.openai.unknown_fields import Nested, Struct
from pdmesh.services.gateway.openai.unsupported_fields import NeutralValues

# The type is Any because a client may send anything in these fields. The module `translation`
# checks those that have an effect.
_Anything = Any


class ImageSource(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The source of an image.

    `file_id` and `content` are fields of other kinds of sources, which are refused.
    """

    type: str
    media_type: str | None = None
    data: str | None = None
    url: str | None = None
    file_id: _Anything = None
    content: _Anything = None


class MessageBlock(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A piece of a message's content. `type` decides which fields the piece may have."""

    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, _Anything] | None = None
    tool_use_id: str | None = None
    content: str | list[MessageBlock] | None = None
    is_error: bool | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None
    source: ImageSource | None = None
    citations: _Anything = None
    cache_control: _Anything = None  # prompts are cached anyway


class InputMessage(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[MessageBlock]


class MessagesTool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`input_schema` is a JSON schema. Only tools that the client itself runs are supported."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, _Anything] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    eager_input_streaming: bool | None = None
    input_examples: _Anything = None
    cache_control: _Anything = None


class MessagesToolChoice(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: str | None = None


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    effort: ReasoningEffort | None = None
    format: _Anything = None


class CountTokensRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields that determine the prompt."""

    model: str
    messages: list[InputMessage]
    system: str | list[MessageBlock] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, _Anything] | None = None
    cache_control: _Anything = None


class MessagesRequest(CountTokensRequest, forbid_unknown_fields=True, kw_only=True):
    """The fields are Anthropic's, then vLLM's, then pdmesh's own."""

    # Unsupported fields, with the values that have no effect. None never has an effect.
    UNSUPPORTED: ClassVar[NeutralValues] = NeutralValues(
        {
            "container": ("", {}),
            "mcp_servers": ([],),
            "watermarking": (False,),
            "kv_transfer_params": ({},),
            "ec_transfer_params": ({},),
            "vllm_xargs": ({},),
            "mm_payload": (),
        }
    )

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: _Anything = None
    service_tier: str | None = None
    container: _Anything = None
    mcp_servers: _Anything = None
    watermarking: _Anything = None
    kv_transfer_params: _Anything = None
    ec_transfer_params: _Anything = None
    vllm_xargs: _Anything = None
    mm_payload: _Anything = None
    seed: int | None = None
    ignore_eos: bool = False
    cache_salt: str = ""
    chat_id: str = ""
    scenario: str = ""
    session: Session | None = None


_WITHIN: Final[Mapping[str, Struct]] = {
    "messages": InputMessage,
    "system": MessageBlock,
    "tools": MessagesTool,
    "tool_choice": MessagesToolChoice,
    "thinking": Thinking,
    "output_config": OutputConfig,
}
_NESTED: Final[Nested] = {
    CountTokensRequest: _WITHIN,
    MessagesRequest: {**_WITHIN, "session": Session},
    InputMessage: {"content": MessageBlock},
    MessageBlock: {"content": MessageBlock, "source": ImageSource},
}
_messages_decoder: Final = msgspec.json.Decoder(MessagesRequest)
_count_decoder: Final = msgspec.json.Decoder(CountTokensRequest)


def parse_messages(body: bytes, ignored: list[str] | None = None) -> MessagesRequest:
    """Raises InvalidRequest with the field.

    If `ignored` is None, an unknown field is refused. Otherwise its path is added to `ignored`.
    """
    request = decoded(_messages_decoder, _NESTED, body, ignored)
    MessagesRequest.UNSUPPORTED.check(request)
    _check_thinking(request)
    return request


def _check_thinking(request: MessagesRequest) -> None:
    """Check that the thinking budget leaves room for an answer, as Anthropic's API does."""
    thinking, field = request.thinking, "thinking.budget_tokens"
    if thinking is None or thinking.type != "enabled":
        return
    if thinking.budget_tokens is None:
        raise InvalidRequest(f"missing field: {field}", reason="MISSING_FIELD", field=field)
    if thinking.budget_tokens >= request.max_tokens:
        raise InvalidRequest(f"{field} must be less than max_tokens", field=field)


def parse_count_tokens(body: bytes, ignored: list[str] | None = None) -> CountTokensRequest:
    """As `parse_messages`."""
    return decoded(_count_decoder, _NESTED, body, ignored)


def unsupported(field: str) -> InvalidRequest:
    return InvalidRequest(f"{field} is not supported", reason="UNSUPPORTED_FIELD", field=field)
