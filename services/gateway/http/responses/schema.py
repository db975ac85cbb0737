"""The requests of OpenAI's Responses API that the gateway accepts, as typed structs.

A field that would change the answer but is not supported is refused. Fields that have no effect in
this gateway are accepted. The module `translation` makes a chat from each request. The chat is then
checked like any other chat.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final, Literal

import msgspec

from pdmesh.errors import InvalidRequest, shortened
from pdmesh.services.gateway.openai.json_body import decoded
from pdmesh.services.gateway.openai.schema import ReasoningEffort, Session
from pdmesh.services.gateway.openai.unknown_fields import Nested
from pdmesh.services.gateway.openai.unsupported_fields import NeutralValues
from pdmesh.services.gateway.request.answer_form import StructuredOutputs
from pdmesh.services.gateway.request.bounds import in_range

_MAX_METADATA: Final = 16
_MAX_KEY_CHARS: Final = 64
_MAX_VALUE_CHARS: Final = 512

# The type is Any because a client may send anything in these fields. The module `translation`
# checks those that have an effect.
_Anything = Any


class ItemPart(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A piece of an item's content. `type` decides which fields the piece may have."""

    type: str
    text: str | None = None
    refusal: str | None = None
    annotations: _Anything = None
    logprobs: _Anything = None
    image_url: _Anything = None
    file_id: _Anything = None
    file_data: _Anything = None
    file_url: _Anything = None
    filename: _Anything = None
    detail: _Anything = None


class InputItem(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A message, a tool call, a tool's result or a piece of reasoning.

    The fields depend on `type`.
    """

    type: str | None = None
    id: str | None = None
    status: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[ItemPart] | None = None
    phase: str | None = None
    summary: list[ItemPart] | None = None
    encrypted_content: str | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    output: str | list[ItemPart] | None = None


class ResponseTool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A tool. Only functions are supported. The client runs them. Other types are refused."""

    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, _Anything] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


class ChosenTool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: str
    name: str | None = None
    mode: str | None = None
    tools: _Anything = None
    server_label: str | None = None


class TextConfig(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    format: dict[str, _Anything] | None = None
    verbosity: _Anything = None


class ReasoningConfig(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Reasoning is shown in full: the gateway makes no summaries."""

    effort: ReasoningEffort | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponseStreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_obfuscation: bool | None = None  # padding against traffic analysis; none is sent


class ResponsesRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields are OpenAI's, then vLLM's, then pdmesh's own."""

    # Unsupported fields, with the values that have no effect. None never has an effect.
    UNSUPPORTED: ClassVar[NeutralValues] = NeutralValues(
        {
            "service_tier": ("auto", "default"),
            "prompt": (),
            "conversation": (),
            "moderation": (),
            "priority": (0,),
            "watermarking": (False,),
            "kv_transfer_params": ({},),
            "ec_transfer_params": ({},),
            "vllm_xargs": ({},),
            "mm_payload": (),
            "media_io_kwargs": ({},),
            "mm_processor_kwargs": ({},),
            "previous_input_messages": ([],),
            "enable_response_messages": (False,),
        }
    )

    model: str
    input: str | list[InputItem]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    background: bool | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: str | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: _Anything = None
    prompt_cache_options: _Anything = None
    service_tier: str | None = None
    prompt: _Anything = None
    conversation: _Anything = None
    moderation: _Anything = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    chat_template_kwargs: dict[str, _Anything] | None = None
    include_reasoning: bool | None = None
    request_id: str | None = None  # ignored, because the gateway chooses the ids of requests
    session_id: str | None = None
    priority: _Anything = None
    watermarking: _Anything = None
    kv_transfer_params: _Anything = None
    ec_transfer_params: _Anything = None
    vllm_xargs: _Anything = None
    mm_payload: _Anything = None
    media_io_kwargs: _Anything = None
    mm_processor_kwargs: _Anything = None
    previous_input_messages: _Anything = None
    enable_response_messages: _Anything = None
    ignore_eos: bool = False
    cache_salt: str = ""
    chat_id: str = ""
    scenario: str = ""
    session: Session | None = None


NESTED_IN_ITEMS: Final[Nested] = {
    InputItem: {"content": ItemPart, "summary": ItemPart, "output": ItemPart}
}
_NESTED: Final[Nested] = {
    **NESTED_IN_ITEMS,
    ResponsesRequest: {
        "input": InputItem,
        "tools": ResponseTool,
        "tool_choice": ChosenTool,
        "text": TextConfig,
        "reasoning": ReasoningConfig,
        "stream_options": ResponseStreamOptions,
        "structured_outputs": StructuredOutputs,
        "session": Session,
    },
}
_decoder: Final = msgspec.json.Decoder(ResponsesRequest)


def parse_responses(body: bytes, ignored: list[str] | None = None) -> ResponsesRequest:
    """Raises InvalidRequest with the field.

    If `ignored` is None, an unknown field is refused. Otherwise its path is added to `ignored`.
    """
    request = decoded(_decoder, _NESTED, body, ignored)
    ResponsesRequest.UNSUPPORTED.check(request)
    if request.background and request.store is False:
        raise InvalidRequest("background needs store", field="background")
    if request.background and request.stream:
        message = "stream with background is not supported"
        raise InvalidRequest(message, reason="UNSUPPORTED_FIELD", field="stream")
    in_range("max_output_tokens", request.max_output_tokens, 1, 1 << 31)
    _check_metadata(request.metadata or {})
    return request


def _check_metadata(metadata: Mapping[str, str]) -> None:
    """Limit the metadata, which is kept and sent back."""
    if len(metadata) > _MAX_METADATA:
        raise InvalidRequest(f"at most {_MAX_METADATA} pairs of metadata", field="metadata")
    for key, value in metadata.items():
        if len(key) > _MAX_KEY_CHARS or len(value) > _MAX_VALUE_CHARS:
            field = f"metadata.{shortened(key)}"
            message = f"{field}: a key has at most {_MAX_KEY_CHARS} characters, a value at most "
            raise InvalidRequest(f"{message}{_MAX_VALUE_CHARS}", field=field)


def unsupported(field: str) -> InvalidRequest:
    return InvalidRequest(f"{field} is not supported", reason="UNSUPPORTED_FIELD", field=field)
