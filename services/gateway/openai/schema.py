"""The OpenAI requests that the gateway accepts, with vLLM's further fields, as typed structs.

A request gets a 400 if it sets a field that would change the answer but is not supported.
`_NEUTRAL` lists these fields, each with the values that have no effect and are accepted. A field
that no known API has is ignored (`unknown_fields`) or refused, depending on a setting. Numbers,
strings and lists that have an effect are bounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import msgspec

from pdmesh.core.kv.tiers.session_holds import SessionState
from pdmesh.errors import InvalidRequest
from pdmesh.services.gateway.openai import openapi_bounds as told
from pdmesh.services.gateway.openai.chat_messages import (
    NESTED_IN_MESSAGES,
    ChatMessage,
    check_messages,
)
from pdmesh.services.gateway.openai.json_body import decoded
from pdmesh.services.gateway.openai.tools import (
    NESTED_IN_TOOLS,
    NamedTool,
    Tool,
    ToolChoice,
    check_depth,
    check_tools,
)
from pdmesh.services.gateway.openai.unknown_fields import Nested
from pdmesh.services.gateway.openai.unsupported_fields import NeutralValues
from pdmesh.services.gateway.request.answer_form import (
    JsonSchemaFormat,
    ResponseFormat,
    StructuredOutputs,
    asked_over_http,
)
from pdmesh.services.gateway.request.bounds import (
    MAX_MESSAGES,
    MAX_TOKENS,
    check_choices,
    check_names,
    check_sampling,
    context_exceeded,
    in_range,
    stops_of,
)
from pdmesh.services.gateway.request.spec import ToldSession

MAX_CHOICES: Final = 64  # the number of prompts times n
_MAX_PROMPTS: Final = 16

# The type is Any because a client may send anything here. Each use checks the value.
_Anything = Any


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # padding against traffic analysis; none is sent


class RepetitionDetection(msgspec.Struct, forbid_unknown_fields=True):
    """As in vLLM. If `max_pattern_size` is 0, nothing is detected.

    A `min_pattern_size` of 0 means 1.
    """

    max_pattern_size: told.PatternSize = 0
    min_pattern_size: told.PatternSize = 0
    min_count: told.PatternCount = 0


class Session(msgspec.Struct, forbid_unknown_fields=True):
    """A field of pdmesh's own. `state` says how the conversation goes on.

    The state decides how long instances keep the KV of the conversation.
    """

    id: told.SessionId
    state: Literal["paused_for_tool", "resumed", "done"]


class _Common(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields of chats and completions: OpenAI's, then vLLM's, then four of pdmesh's own."""

    model: told.Name
    max_tokens: told.NumTokens | None = None
    temperature: told.Temperature | None = None
    top_p: told.TopP | None = None
    n: told.NumChoices | None = None
    seed: told.Seed | None = None
    stop: told.Stop | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    presence_penalty: told.Penalty | None = None
    frequency_penalty: told.Penalty | None = None
    logit_bias: told.LogitBias | None = None
    repetition_penalty: told.RepetitionPenalty | None = None
    top_k: told.TopK | None = None
    min_p: told.MinP | None = None
    min_tokens: told.MinTokens | None = None
    bad_words: told.BadWords | None = None
    allowed_token_ids: told.AllowedIds | None = None
    stop_token_ids: told.StopIds | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    # Only affects slow tokenizers, which the gateway does not use.
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: told.Truncation | None = None
    truncation_side: Literal["left", "right"] | None = None
    return_token_ids: bool | None = None
    prompt_logprobs: told.Logprobs | None = None
    request_id: str | None = None  # ignored, because the gateway chooses the ids of requests
    session_id: str | None = None
    priority: _Anything = None
    use_beam_search: _Anything = None
    length_penalty: _Anything = None
    logprob_token_ids: told.LogprobIds | None = None
    thinking_token_budget: told.ThinkingBudget | None = None
    structured_outputs: StructuredOutputs | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_offsets: _Anything = None
    repetition_detection: RepetitionDetection | None = None
    watermarking: _Anything = None
    kv_transfer_params: _Anything = None
    ec_transfer_params: _Anything = None
    vllm_xargs: _Anything = None
    mm_payload: _Anything = None
    response_format: ResponseFormat | None = None
    add_special_tokens: bool | None = None
    ignore_eos: bool = False
    cache_salt: told.Name = ""
    chat_id: told.Name = ""
    scenario: told.Name = ""
    session: Session | None = None


class ChatCompletionRequest(_Common, forbid_unknown_fields=True, kw_only=True):
    messages: Annotated[list[ChatMessage], told.entries(1, MAX_MESSAGES)]
    max_completion_tokens: told.NumTokens | None = None
    logprobs: bool | None = None
    top_logprobs: told.Logprobs | None = None
    metadata: _Anything = None
    store: _Anything = None
    service_tier: _Anything = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: _Anything = None
    function_call: _Anything = None
    chat_template: _Anything = None
    chat_template_kwargs: dict[str, _Anything] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: _Anything = None
    echo: _Anything = None
    include_reasoning: bool | None = None
    mm_processor_kwargs: _Anything = None
    media_io_kwargs: _Anything = None
    modalities: _Anything = None
    audio: _Anything = None
    prediction: _Anything = None
    reasoning_effort: ReasoningEffort | None = None
    verbosity: _Anything = None
    web_search_options: _Anything = None
    prompt_cache_retention: _Anything = None


class CompletionRequest(_Common, forbid_unknown_fields=True, kw_only=True):
    prompt: str | told.Prompts
    max_tokens: told.NumTokensOrNone | None = None
    logprobs: told.FewLogprobs | None = None
    echo: bool | None = None
    prompt_embeds: _Anything = None
    suffix: _Anything = None
    best_of: int | None = None


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A request like those of vLLM's /tokenize. Either `prompt` or `messages` is set.

    The fields after `messages` are for requests with `messages`.
    """

    model: told.Name
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    messages: Annotated[list[ChatMessage], told.entries(1, MAX_MESSAGES)] | None = None
    tools: list[Tool] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: _Anything = None
    chat_template_kwargs: dict[str, _Anything] | None = None
    mm_processor_kwargs: _Anything = None
    media_io_kwargs: _Anything = None


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A request like those of vLLM's /detokenize."""

    model: str
    tokens: list[int]


# Unsupported fields, with the values that have no effect. None never has an effect.
_NEUTRAL: Final[dict[str, tuple[object, ...]]] = {
    "priority": (0,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "return_token_offsets": (False,),
    "watermarking": (False,),
    "kv_transfer_params": ({},),
    "ec_transfer_params": ({},),
    "vllm_xargs": ({},),
    "mm_payload": (),
    "chat_template": (),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
    "prompt_embeds": ([],),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    "prompt_cache_retention": (),
    "service_tier": ("auto", "default"),
    "suffix": ("",),
}


def _neutral_of(struct: type[msgspec.Struct]) -> dict[str, tuple[object, ...]]:
    return {f: v for f, v in _NEUTRAL.items() if f in struct.__struct_fields__}


_NEUTRAL_CHAT: Final = NeutralValues({**_neutral_of(ChatCompletionRequest), "echo": (False,)})
_NEUTRAL_COMPLETION: Final = NeutralValues(_neutral_of(CompletionRequest))
_NEUTRAL_TOKENIZE: Final = NeutralValues(_neutral_of(TokenizeRequest))
_OF_MESSAGES: Final = (
    "tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs",
)  # fmt: skip

_NESTED_COMMON: Final[Mapping[str, type[msgspec.Struct]]] = {
    "stream_options": StreamOptions,
    "response_format": ResponseFormat,
    "repetition_detection": RepetitionDetection,
    "structured_outputs": StructuredOutputs,
    "session": Session,
}
_NESTED: Final[Nested] = {
    **NESTED_IN_MESSAGES,
    **NESTED_IN_TOOLS,
    ChatCompletionRequest: {
        "messages": ChatMessage,
        **_NESTED_COMMON,
        "tools": Tool,
        "tool_choice": NamedTool,
    },
    CompletionRequest: _NESTED_COMMON,
    TokenizeRequest: {"messages": ChatMessage, "tools": Tool},
    ResponseFormat: {"json_schema": JsonSchemaFormat},
}


def unsupported_fields(struct: type[msgspec.Struct]) -> Mapping[str, tuple[object, ...]]:
    """The unsupported fields of a request, each with the values that have no effect."""
    found: Mapping[type[msgspec.Struct], Mapping[str, tuple[object, ...]]] = {
        ChatCompletionRequest: _NEUTRAL_CHAT,
        CompletionRequest: _NEUTRAL_COMPLETION,
        TokenizeRequest: _NEUTRAL_TOKENIZE,
    }
    return found.get(struct) or getattr(struct, "UNSUPPORTED", {})


_chat_decoder: Final = msgspec.json.Decoder(ChatCompletionRequest)
_completion_decoder: Final = msgspec.json.Decoder(CompletionRequest)
_tokenize_decoder: Final = msgspec.json.Decoder(TokenizeRequest)
_detokenize_decoder: Final = msgspec.json.Decoder(DetokenizeRequest)


def parse_chat(body: bytes, ignored: list[str] | None = None) -> ChatCompletionRequest:
    """Raises InvalidRequest with the field.

    If `ignored` is None, an unknown field is refused. Otherwise its path is added to `ignored`.
    """
    request = decoded(_chat_decoder, _NESTED, body, ignored)
    check_chat(request)
    return request


def check_chat(request: ChatCompletionRequest) -> None:
    """Raises InvalidRequest with the field."""
    _check_common(request, _NEUTRAL_CHAT)
    check_messages(request.messages)
    if request.tools is not None or request.tool_choice is not None:
        check_tools(request.tools, request.tool_choice)
    if request.chat_template_kwargs:
        check_depth(request.chat_template_kwargs, "chat_template_kwargs")
    _check_end(request)
    in_range("max_completion_tokens", request.max_completion_tokens, 1, MAX_TOKENS)
    in_range("top_logprobs", request.top_logprobs, 0, 20)
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", field="top_logprobs")


def parse_completion(body: bytes, ignored: list[str] | None = None) -> CompletionRequest:
    """As `parse_chat`."""
    request = decoded(_completion_decoder, _NESTED, body, ignored)
    check_completion(request)
    in_range("logprobs", request.logprobs, 0, 5)
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise InvalidRequest("best_of must equal n", field="best_of")
    return request


def check_completion(request: CompletionRequest) -> None:
    """Raises InvalidRequest with the field."""
    _check_common(request, _NEUTRAL_COMPLETION)


def parse_tokenize(body: bytes, ignored: list[str] | None = None) -> TokenizeRequest:
    """As `parse_chat`."""
    request = decoded(_tokenize_decoder, _NESTED, body, ignored)
    check_tokenize(request)
    return request


def check_tokenize(request: TokenizeRequest) -> None:
    """Raises InvalidRequest with the field."""
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequest("give either prompt or messages", field="prompt")
    _NEUTRAL_TOKENIZE.check(request)
    if request.messages is not None:
        check_messages(request.messages)
        _check_end(request)
    else:
        for field in _OF_MESSAGES:
            if getattr(request, field) is not None:
                raise InvalidRequest(f"{field} needs messages", field=field)
    check_tools(request.tools, None)
    check_depth(request.chat_template_kwargs, "chat_template_kwargs")


def parse_detokenize(body: bytes, ignored: list[str] | None = None) -> DetokenizeRequest:
    """As `parse_chat`."""
    return decoded(_detokenize_decoder, _NESTED, body, ignored)


def is_echo_alone(request: _Common) -> bool:
    """Whether a completion asks only for an echo of its prompt."""
    if not isinstance(request, CompletionRequest):
        return False
    return bool(request.echo) and request.max_tokens == 0


def prompts_of(
    prompt: str | list[_Anything], vocab_size: int, max_tokens: int
) -> list[str] | list[list[int]]:
    """The prompts of a completion. Each is a text, or at most `max_tokens` token ids.

    Lengths are checked first, because a loop over a million ids would delay all other requests.
    """
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequest("prompt is empty", field="prompt")
    if type(prompt[0]) is int:
        return [checked_ids(prompt, vocab_size, max_tokens)]
    if len(prompt) > _MAX_PROMPTS:
        raise InvalidRequest(f"at most {_MAX_PROMPTS} prompts are allowed", field="prompt")
    if all(type(p) is str for p in prompt):
        return list(prompt)
    if all(type(p) is list and p for p in prompt):
        return [checked_ids(p, vocab_size, max_tokens) for p in prompt]
    raise _wrong_prompt()


def _wrong_prompt() -> InvalidRequest:
    message = (
        "prompt must be a string, token ids, a list of strings, or a list of lists of token ids"
    )
    return InvalidRequest(message, field="prompt")


def checked_ids(
    ids: list[_Anything], vocab_size: int, max_tokens: int, field: str = "prompt"
) -> list[int]:
    """Raises InvalidRequest."""
    if len(ids) > max_tokens:
        raise context_exceeded(f"{len(ids)} tokens", max_tokens, field)
    if ids and set(map(type, ids)) != {int}:
        raise _wrong_prompt()
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        raise InvalidRequest(f"token ids must be 0 to {vocab_size - 1}", field=field)
    return ids


def _check_end(request: ChatCompletionRequest | TokenizeRequest) -> None:
    """Check that the request does not both continue the final message and begin a new one."""
    if request.continue_final_message and request.add_generation_prompt is not False:
        message = "continue_final_message needs add_generation_prompt to be false"
        raise InvalidRequest(message, field="continue_final_message")


def check_session(session: Session, chat_id: str) -> None:
    """Raises InvalidRequest."""
    check_names(**{"session.id": session.id})
    if not session.id:
        raise InvalidRequest("session.id must not be empty", field="session.id")
    if chat_id and chat_id != session.id:
        message = "session.id and chat_id name different conversations"
        raise InvalidRequest(message, field="session.id")


def chat_id_of(request: ChatCompletionRequest | CompletionRequest) -> str:
    """The conversation's name: the chat_id, or the session's id if the chat_id is empty."""
    return request.chat_id or (request.session.id if request.session is not None else "")


def session_of(session: Session | None) -> ToldSession | None:
    return None if session is None else ToldSession(session.id, SessionState(session.state))


def _check_common(request: _Common, neutral: NeutralValues) -> None:
    neutral.check(request)
    max_tokens = None if is_echo_alone(request) else request.max_tokens
    check_sampling(max_tokens=max_tokens, temperature=request.temperature, top_p=request.top_p)
    in_range("prompt_logprobs", request.prompt_logprobs, 0, 20)
    if request.prompt_logprobs and request.stream:
        message = "prompt_logprobs are not available in a stream"
        raise InvalidRequest(message, field="prompt_logprobs")
    in_range("min_tokens", request.min_tokens, 0, MAX_TOKENS)
    in_range("truncate_prompt_tokens", request.truncate_prompt_tokens, -1, MAX_TOKENS)
    check_choices(n=request.n, seed=request.seed)
    asked_over_http(request.response_format, request.structured_outputs)
    stops_of(request.stop)
    check_names(
        model=request.model,
        cache_salt=request.cache_salt,
        chat_id=request.chat_id,
        scenario=request.scenario,
    )
    if (session := request.session) is not None:
        check_session(session, request.chat_id)
