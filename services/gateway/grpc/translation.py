"""Translates requests of the gRPC API into OpenAI requests, whose fields have the same meaning.

`NAMES` lists the fields whose names differ, so that errors name the field that the client sent. In
gRPC, a field that holds JSON is a string. It has the same bounds as JSON in an HTTP body.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal

from pdmesh.errors import InvalidRequest
from pdmesh.services.gateway.openai.chat_messages import (
    CalledFunction,
    ChatMessage,
    ContentPart,
    ImageFile,
    ToolCall,
)
from pdmesh.services.gateway.openai.json_body import objects_of
from pdmesh.services.gateway.openai.schema import (
    ChatCompletionRequest,
    CompletionRequest,
    ReasoningEffort,
    RepetitionDetection,
    Session,
    TokenizeRequest,
)
from pdmesh.services.gateway.openai.tools import (
    MAX_TOOLS,
    FunctionDefinition,
    FunctionName,
    NamedTool,
    Tool,
    ToolChoice,
)
from pdmesh.services.gateway.openai.translated import FieldNames, TranslatedChat
from pdmesh.services.gateway.request.answer_form import StructuredOutputs
from pdmesh.services.gateway.request.bounds import MAX_MESSAGES, check_text, in_range, nul_refused
from pdmesh.v1 import inference_service_pb2 as pb
from pdmesh.v1.common_pb2 import (
    SESSION_STATE_DONE,
    SESSION_STATE_PAUSED_FOR_TOOL,
    SESSION_STATE_RESUMED,
)

Role = Literal["system", "developer", "user", "assistant", "tool"]

NAMES: Final[FieldNames] = {
    "logprobs": "num_logprobs",
    "top_logprobs": "num_logprobs",
    "prompt_logprobs": "num_prompt_logprobs",
    "response_format": "structured_output",
    "structured_outputs": "structured_output",
    "structured_outputs.json": "structured_output.json_schema",
    "tool_choice.function.name": "tool_choice.function",
}
NAMES_OF_TOKENIZE: Final[FieldNames] = {"prompt": "text"}
NAMES_OF_DETOKENIZE: Final[FieldNames] = {"tokens": "token_ids"}
_NAMES_OF_IDS: Final[FieldNames] = {**NAMES, "prompt": "token_ids"}

# The fields of GenerationParams that are copied unchanged, and their names in the OpenAI request.
_PLAIN: Final[FieldNames] = {
    **{
        name: name
        for name in (
            "max_tokens", "temperature", "top_p", "seed", "presence_penalty", "frequency_penalty",
            "repetition_penalty", "top_k", "min_p", "min_tokens", "truncate_prompt_tokens",
            "ignore_eos", "return_token_ids", "thinking_token_budget",
        )
    },
    "include_stop_in_output": "include_stop_str_in_output",
    "num_prompt_logprobs": "prompt_logprobs",
}  # fmt: skip
_PROMPT_SWITCHES: Final = ("add_special_tokens", "add_generation_prompt", "continue_final_message")
_CHAT_SWITCHES: Final = (*_PROMPT_SWITCHES, "parallel_tool_calls", "include_reasoning")
_LISTS: Final = ("stop", "bad_words", "allowed_token_ids", "stop_token_ids", "logprob_token_ids")
_ROLES: Final[Mapping[str, Role]] = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_MODES: Final[Mapping[int, ToolChoice]] = {
    pb.TOOL_CHOICE_MODE_UNSPECIFIED: "auto",
    pb.TOOL_CHOICE_MODE_AUTO: "auto",
    pb.TOOL_CHOICE_MODE_NONE: "none",
    pb.TOOL_CHOICE_MODE_REQUIRED: "required",
}
_EFFORTS: Final[Mapping[int, ReasoningEffort | None]] = {
    pb.REASONING_EFFORT_UNSPECIFIED: None,
    pb.REASONING_EFFORT_NONE: "none",
    pb.REASONING_EFFORT_MINIMAL: "minimal",
    pb.REASONING_EFFORT_LOW: "low",
    pb.REASONING_EFFORT_MEDIUM: "medium",
    pb.REASONING_EFFORT_HIGH: "high",
    pb.REASONING_EFFORT_XHIGH: "xhigh",
    pb.REASONING_EFFORT_MAX: "max",
}
_SESSION_STATES: Final[Mapping[int, Literal["paused_for_tool", "resumed", "done"]]] = {
    SESSION_STATE_PAUSED_FOR_TOOL: "paused_for_tool",
    SESSION_STATE_RESUMED: "resumed",
    SESSION_STATE_DONE: "done",
}
_SIDES: Final[Mapping[int, Literal["left", "right"] | None]] = {
    pb.TRUNCATION_SIDE_UNSPECIFIED: None,
    pb.TRUNCATION_SIDE_LEFT: "left",
    pb.TRUNCATION_SIDE_RIGHT: "right",
}


def completion_of(request: pb.GenerateRequest) -> tuple[CompletionRequest, FieldNames]:
    """Raises InvalidRequest."""
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise InvalidRequest("either text or token_ids is needed", field="prompt")
    prompt = _prompt(request, "text")
    completion = CompletionRequest(model=request.model, prompt=prompt)
    if request.further_prompts:
        completion.prompt = [prompt]
        for index, further in enumerate(request.further_prompts):
            where = f"further_prompts[{index}]"
            if further.WhichOneof("kind") != kind:
                raise InvalidRequest(
                    f"{where} must have {kind}, like the first prompt", field=where
                )
            completion.prompt.append(_prompt(further, f"{where}.text"))
    if request.echo:
        completion.echo = True
    if request.HasField("add_special_tokens"):
        completion.add_special_tokens = request.add_special_tokens
    if request.HasField("params"):
        _set_params(completion, request.params)
    _set_route(completion, request)
    return completion, _NAMES_OF_IDS if kind == "token_ids" else NAMES


def chat_of(request: pb.ChatRequest) -> TranslatedChat:
    """Raises InvalidRequest."""
    names = dict[str, str]()
    chat = ChatCompletionRequest(model=request.model, messages=_messages(request.messages, names))
    if request.tools or request.chat_template_kwargs:
        chat.tools, chat.chat_template_kwargs = _json_fields(request)
    if request.HasField("tool_choice"):
        chat.tool_choice = _tool_choice(request.tool_choice)
    for field, value in request.ListFields():
        if field.name in _CHAT_SWITCHES:
            setattr(chat, field.name, value)
    if request.reasoning_effort:
        if request.reasoning_effort not in _EFFORTS:
            raise _unknown("reasoning_effort")
        chat.reasoning_effort = _EFFORTS[request.reasoning_effort]
    if request.HasField("params"):
        _set_params(chat, request.params)
    _set_route(chat, request)
    return TranslatedChat(chat, {**NAMES, **names} if names else NAMES)


def tokenize_of(request: pb.TokenizeRequest) -> tuple[TokenizeRequest, FieldNames]:
    """Raises InvalidRequest."""
    check_text(model=request.model, text=request.text)
    names = dict(NAMES_OF_TOKENIZE)
    asked = TokenizeRequest(request.model, request.text if request.HasField("text") else None)
    if request.messages:
        asked.messages = _messages(request.messages, names)
    if request.tools or request.chat_template_kwargs:
        asked.tools, asked.chat_template_kwargs = _json_fields(request)
    for field, value in request.ListFields():
        if field.name in (*_PROMPT_SWITCHES, "return_token_strs"):
            setattr(asked, field.name, value)
    return asked, names


def _prompt(given: pb.GenerateRequest | pb.Prompt, field: str) -> str | list[int]:
    if given.HasField("token_ids"):
        return list(given.token_ids.ids)
    return _without_nul(given.text, field)


def _set_route(
    asked: ChatCompletionRequest | CompletionRequest, request: pb.GenerateRequest | pb.ChatRequest
) -> None:
    asked.n = request.n or None
    asked.scenario = request.scenario
    asked.chat_id = request.chat_id
    asked.cache_salt = request.cache_salt
    if request.HasField("session"):
        if (state := _SESSION_STATES.get(request.session.state)) is None:
            raise _unknown("session.state")
        asked.session = Session(request.session.id, state)


def _set_params(
    asked: ChatCompletionRequest | CompletionRequest, params: pb.GenerationParams
) -> None:
    for field, value in params.ListFields():
        if (name := _PLAIN.get(field.name)) is not None:
            setattr(asked, name, value)
        elif field.name in _LISTS:
            setattr(asked, field.name, list(value))
        else:
            _set_other(asked, field.name, params)
    for stop in params.stop:
        check_text(stop=stop)
    for word in params.bad_words:
        check_text(bad_words=word)


def _set_other(
    asked: ChatCompletionRequest | CompletionRequest, field: str, params: pb.GenerationParams
) -> None:
    match field:
        case "show_special_tokens":
            asked.skip_special_tokens = not params.show_special_tokens
        case "logit_bias":
            asked.logit_bias = {str(token): bias for token, bias in params.logit_bias.items()}
        case "num_logprobs":
            in_range("num_logprobs", params.num_logprobs, 0, 20)
            if isinstance(asked, ChatCompletionRequest):
                asked.logprobs, asked.top_logprobs = True, params.num_logprobs
            else:
                asked.logprobs = params.num_logprobs
        case "truncation_side":
            if params.truncation_side not in _SIDES:
                raise _unknown("truncation_side")
            asked.truncation_side = _SIDES[params.truncation_side]
        case "repetition_detection":
            given = params.repetition_detection
            asked.repetition_detection = RepetitionDetection(
                given.max_pattern_size, given.min_pattern_size, given.min_count
            )
        case "structured_output":
            asked.structured_outputs = _form(params.structured_output)
        case _:
            raise AssertionError(f"{field} is not translated")


def _form(given: pb.StructuredOutput) -> StructuredOutputs:
    kind = given.WhichOneof("kind")
    form = StructuredOutputs(disable_any_whitespace=given.disable_any_whitespace)
    match kind:
        case None:
            raise InvalidRequest("structured_output has no kind", field="structured_output")
        case "json_schema":
            form.json = given.json_schema
        case "choice":
            choices = given.choice.choices
            form.choice = [_without_nul(text, "structured_output.choice") for text in choices]
        case _:
            setattr(form, kind, getattr(given, kind))
    return form


def _messages(messages: Sequence[pb.ChatMessage], names: dict[str, str]) -> list[ChatMessage]:
    if not 0 < len(messages) <= MAX_MESSAGES:
        raise InvalidRequest(f"1 to {MAX_MESSAGES} messages are needed", field="messages")
    return [_message(each, f"messages[{at}]", names) for at, each in enumerate(messages)]


def _message(message: pb.ChatMessage, where: str, names: dict[str, str]) -> ChatMessage:
    role = _ROLES.get(message.role)
    if role is None:
        known = ", ".join(_ROLES)
        raise InvalidRequest(f"{where}.role is none of {known}", field=f"{where}.role")
    found = ChatMessage(role, _without_nul(message.content, f"{where}.content"))
    if message.content_parts:
        if message.content:
            field = f"{where}.content_parts"
            raise InvalidRequest(f"give either {field} or content, not both", field=field)
        found.content = _parts(message.content_parts, f"{where}.content_parts", names)
        names[f"{where}.content"] = f"{where}.content_parts"
    if message.tool_calls:
        found.tool_calls = _calls(message.tool_calls, f"{where}.tool_calls")
        found.content = found.content or None
    for field in ("name", "tool_call_id", "reasoning"):
        if text := getattr(message, field):
            setattr(found, field, _without_nul(text, f"{where}.{field}"))
    return found


def _parts(parts: Sequence[pb.ContentPart], where: str, names: dict[str, str]) -> list[ContentPart]:
    return [_part(part, f"{where}[{at}]", names) for at, part in enumerate(parts)]


def _part(part: pb.ContentPart, where: str, names: dict[str, str]) -> ContentPart:
    match part.WhichOneof("kind"):
        case "text":
            return ContentPart("text", _without_nul(part.text, f"{where}.text"))
        case "image_url":
            return ContentPart("image_url", image_url=part.image_url)
        case "image":
            names[f"{where.replace('content_parts', 'content')}.image_url"] = f"{where}.image"
            return ImageFile("image_url", data=part.image)
        case _:
            return ContentPart("text")


def _calls(calls: Sequence[pb.ToolCall], where: str) -> list[ToolCall]:
    found: list[ToolCall] = []
    for at, call in enumerate(calls):
        place, function = f"{where}[{at}]", None
        if call.HasField("function"):
            function = CalledFunction(
                _without_nul(call.function.name, f"{place}.function.name"),
                _without_nul(call.function.arguments, f"{place}.function.arguments"),
            )
        found.append(ToolCall(function, _without_nul(call.id, f"{place}.id")))
    return found


def _json_fields(
    request: pb.ChatRequest | pb.TokenizeRequest,
) -> tuple[list[Tool] | None, dict[str, object] | None]:
    """The tools, and the variables of the chat template."""
    if len(request.tools) > MAX_TOOLS:
        raise InvalidRequest(f"at most {MAX_TOOLS} tools", field="tools")
    texts = {
        f"tools[{at}].function.parameters": tool.function.parameters
        for at, tool in enumerate(request.tools)
        if tool.function.HasField("parameters")
    }
    if request.chat_template_kwargs:
        texts["chat_template_kwargs"] = request.chat_template_kwargs
    objects = objects_of(texts) if texts else {}
    tools = [_tool(tool, f"tools[{at}].function", objects) for at, tool in enumerate(request.tools)]
    return tools or None, objects.get("chat_template_kwargs")


def _tool(tool: pb.Tool, where: str, objects: Mapping[str, dict[str, object]]) -> Tool:
    if not tool.HasField("function"):
        return Tool()
    given = tool.function
    function = FunctionDefinition(_without_nul(given.name, f"{where}.name"))
    if given.HasField("description"):
        function.description = _without_nul(given.description, f"{where}.description")
    if given.HasField("strict"):
        function.strict = given.strict
    function.parameters = objects.get(f"{where}.parameters")
    return Tool(function=function)


def _tool_choice(choice: pb.ToolChoice) -> ToolChoice | None:
    if choice.WhichOneof("kind") == "function":
        return NamedTool(FunctionName(choice.function))
    if choice.mode not in _MODES:
        raise _unknown("tool_choice.mode")
    return _MODES[choice.mode]


def _without_nul(text: str, field: str) -> str:
    if "\0" in text:
        raise nul_refused(field)
    return text


def _unknown(field: str) -> InvalidRequest:
    return InvalidRequest(f"{field} has an unknown value", field=field)
