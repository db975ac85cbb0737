"""Makes a chat from a request to the Responses API, as plain vLLM does.

An assistant's reasoning, text and tool calls are separate items. Consecutive items of these kinds
may form one message of the chat.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, get_args

from pdmesh.errors import InvalidRequest
from pdmesh.services.gateway.http.responses.schema import (
    ChosenTool,
    InputItem,
    ItemPart,
    ResponsesRequest,
    ResponseTool,
    unsupported,
)
from pdmesh.services.gateway.openai.chat_messages import (
    CalledFunction,
    ChatMessage,
    ContentPart,
    ImageDetail,
    ToolCall,
    check_alone,
)
from pdmesh.services.gateway.openai.schema import ChatCompletionRequest
from pdmesh.services.gateway.openai.tools import (
    FunctionDefinition,
    FunctionName,
    NamedTool,
    Tool,
    ToolChoice,
)
from pdmesh.services.gateway.openai.translated import TranslatedChat
from pdmesh.services.gateway.request.answer_form import JsonSchemaFormat, ResponseFormat

LOGPROBS: Final = "message.output_text.logprobs"
PREVIOUS: Final = "previous_response_id"
_TEXT_PARTS: Final = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
_PART_CONTENT: Final = (
    "text", "refusal", "image_url", "file_id", "file_data", "file_url", "filename",
)  # fmt: skip
_DETAILS: Final = (None, *get_args(ImageDetail))
# Fields that have the same meaning in both APIs.
_SAME: Final = (
    "stream", "temperature", "top_p", "parallel_tool_calls", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "logit_bias", "top_k", "min_p", "seed", "stop",
    "stop_token_ids", "include_stop_str_in_output", "skip_special_tokens", "structured_outputs",
    "chat_template_kwargs", "include_reasoning", "ignore_eos", "cache_salt", "chat_id", "scenario",
    "session",
)  # fmt: skip


def chat_of(request: ResponsesRequest, previous: Sequence[InputItem] = ()) -> TranslatedChat:
    """The chat. Raises InvalidRequest with the field of `request`.

    `previous` has the items of the conversation that the request continues.
    """
    conversation = _Conversation()
    if request.instructions:
        conversation.append(ChatMessage("system", request.instructions), "instructions")
    for item in previous:
        conversation.add(item, PREVIOUS)
    if isinstance(request.input, str):
        conversation.append(ChatMessage("user", request.input), "input")
    else:
        for index, item in enumerate(request.input):
            conversation.add(item, f"input[{index}]")
    names = conversation.names
    names |= {"messages": "input", "max_completion_tokens": "max_output_tokens"}
    chat = ChatCompletionRequest(model=request.model, messages=conversation.messages)
    for field in _SAME:
        setattr(chat, field, getattr(request, field))
    chat.max_completion_tokens = request.max_output_tokens
    if LOGPROBS in (request.include or ()):
        chat.logprobs, chat.top_logprobs = True, request.top_logprobs
        names["logprobs"] = "include"
    _set_tools(chat, request, names)
    _set_output(chat, request, names)
    return TranslatedChat(chat, names)


def _set_tools(
    chat: ChatCompletionRequest, request: ResponsesRequest, names: dict[str, str]
) -> None:
    if request.tools:
        chat.tools = [_tool(tool, f"tools[{at}]") for at, tool in enumerate(request.tools)]
        for at in range(len(request.tools)):
            names[f"tools[{at}].function"] = f"tools[{at}]"
    if request.tool_choice is not None:
        chat.tool_choice = _choice(request.tool_choice)
        names["tool_choice.function"] = "tool_choice"


def _set_output(
    chat: ChatCompletionRequest, request: ResponsesRequest, names: dict[str, str]
) -> None:
    if request.reasoning is not None and request.reasoning.effort is not None:
        chat.reasoning_effort = request.reasoning.effort
        names["reasoning_effort"] = "reasoning.effort"
    if request.text is None:
        return
    chat.verbosity = request.text.verbosity
    names["verbosity"] = "text.verbosity"
    form = request.text.format
    if form is None:
        return
    names["response_format"] = names["response_format.json_schema"] = "text.format"
    kind, schema = form.get("type"), form.get("schema")
    match kind:
        case "text" | "json_object":
            chat.response_format = ResponseFormat(kind)
        case "json_schema" if isinstance(schema, dict):
            name = form.get("name") if isinstance(form.get("name"), str) else None
            chat.response_format = ResponseFormat(kind, JsonSchemaFormat(name, schema=schema))
            names["response_format.json_schema.schema"] = "text.format.schema"
        case "json_schema":
            field = "text.format.schema"
            raise InvalidRequest(f"{field} is a JSON schema", field=field)
        case _:
            raise unsupported("text.format")


def _tool(tool: ResponseTool, where: str) -> Tool:
    if tool.type != "function":
        raise unsupported(f"{where}.type")
    return Tool(
        function=FunctionDefinition(tool.name, tool.description, tool.parameters, tool.strict)
    )


def _choice(choice: str | ChosenTool) -> ToolChoice:
    match choice:
        case "none" | "auto" | "required":
            return choice
        case ChosenTool(type="function", name=str(name)):
            return NamedTool(FunctionName(name))
        case _:
            raise unsupported("tool_choice")


class _Conversation:
    """The chat's messages. `names` maps paths in the chat to paths in the request, for errors."""

    def __init__(self) -> None:
        self.messages: list[ChatMessage] = []
        self.names: dict[str, str] = {}

    def append(self, message: ChatMessage, where: str) -> str:
        known = f"messages[{len(self.messages)}]"
        self.names[known] = where
        self.messages.append(message)
        return known

    def add(self, item: InputItem, where: str) -> None:
        match item.type:
            case None | "message":
                self._add_message(item, where)
            case "reasoning":
                self._add_reasoning(item, where)
            case "function_call":
                self._add_call(item, where)
            case "function_call_output":
                content = _content(item.output, f"{where}.output")
                result = ChatMessage("tool", content, tool_call_id=item.call_id)
                known = self.append(result, where)
                self.names |= {
                    f"{known}.tool_call_id": f"{where}.call_id",
                    f"{known}.content": f"{where}.output",
                }
            case kind:
                field = f"{where}.type"
                message = f"{field}: items of type {kind[:32]} are not supported"
                raise InvalidRequest(message, reason="UNSUPPORTED_FIELD", field=field)

    def _assistant(self, where: str) -> ChatMessage:
        """The last message if it is an assistant's, else a new one."""
        if self.messages and self.messages[-1].role == "assistant":
            return self.messages[-1]
        self.append(ChatMessage("assistant"), where)
        return self.messages[-1]

    def _add_message(self, item: InputItem, where: str) -> None:
        if item.role is None:
            field = f"{where}.role"
            raise InvalidRequest(f"missing field: {field}", reason="MISSING_FIELD", field=field)
        if item.role == "user":
            self._add_user(item, where)
            return
        content = _content(item.content, f"{where}.content")
        if item.role != "assistant":
            self.append(ChatMessage(item.role, content), where)
        elif (message := self._assistant(where)).content is None:
            message.content = content
        else:
            self.append(ChatMessage("assistant", content), where)

    def _add_user(self, item: InputItem, where: str) -> None:
        """Add a user's message. Only these messages may have images."""
        if isinstance(item.content, str) or not any(map(_is_image, item.content or ())):
            content = _content(item.content, f"{where}.content")
            self.append(ChatMessage("user", content), where)
            return
        parts: list[ContentPart] = []
        known = self.append(ChatMessage("user", parts), where)
        for at, part in enumerate(item.content or ()):
            place = f"{where}.content[{at}]"
            self.names[f"{known}.content[{at}]"] = place
            if not _is_image(part):
                parts.append(ContentPart("text", _text_of(part, place)))
                continue
            check_alone(part, "image_url", _PART_CONTENT, place)
            if part.detail not in _DETAILS:
                field = f"{place}.detail"
                raise InvalidRequest(f"{field} is one of {', '.join(_DETAILS[1:])}", field=field)
            if not isinstance(part.image_url, str):
                field = f"{place}.image_url"
                raise InvalidRequest(f"missing field: {field}", reason="MISSING_FIELD", field=field)
            parts.append(ContentPart("image_url", image_url=part.image_url))

    def _add_reasoning(self, item: InputItem, where: str) -> None:
        if item.encrypted_content:
            raise unsupported(f"{where}.encrypted_content")
        own = _texts(item.content, f"{where}.content")
        texts = own or _texts(item.summary, f"{where}.summary")
        message = self._assistant(where)
        if message.reasoning is not None:
            self.append(ChatMessage("assistant"), where)
            message = self.messages[-1]
        message.reasoning = "\n".join(texts)

    def _add_call(self, item: InputItem, where: str) -> None:
        message = self._assistant(where)
        call = ToolCall(CalledFunction(item.name or "", item.arguments or ""), item.call_id or "")
        message.tool_calls = [*(message.tool_calls or ()), call]
        known = f"messages[{len(self.messages) - 1}].tool_calls[{len(message.tool_calls) - 1}]"
        self.names |= {
            known: where, f"{known}.id": f"{where}.call_id", f"{known}.function": where,
        }  # fmt: skip


def _content(
    content: str | Sequence[ItemPart] | None, where: str
) -> str | list[ContentPart] | None:
    if content is None or isinstance(content, str):
        return content
    texts = _texts(content, where)
    return texts[0] if len(texts) == 1 else [ContentPart("text", text) for text in texts]


def _is_image(part: ItemPart) -> bool:
    return part.type == "input_image"


def _texts(content: str | Sequence[ItemPart] | None, where: str) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [_text_of(part, f"{where}[{at}]") for at, part in enumerate(content or ())]


def _text_of(part: ItemPart, where: str) -> str:
    if part.type == "refusal":
        return part.refusal or ""
    if part.type not in _TEXT_PARTS:
        field = f"{where}.type"
        message = f"{field}: parts of type {part.type[:32]} are not supported; only text is"
        raise InvalidRequest(message, reason="UNSUPPORTED_FIELD", field=field)
    if part.text is None:
        field = f"{where}.text"
        raise InvalidRequest(f"missing field: {field}", reason="MISSING_FIELD", field=field)
    check_alone(part, "text", _PART_CONTENT, where)
    return part.text
