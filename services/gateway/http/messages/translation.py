"""Makes a chat from a request to the Messages API, as plain vLLM does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from pdmesh.errors import InvalidRequest
from pdmesh.services.gateway.http.messages.schema import (
    CountTokensRequest,
    ImageSource,
    InputMessage,
    MessageBlock,
    MessagesRequest,
    MessagesTool,
    MessagesToolChoice,
    unsupported,
)
from pdmesh.services.gateway.openai.chat_messages import (
    BILLING_LINE,
    CalledFunction,
    ChatMessage,
    ContentPart,
    ImageFile,
    ToolCall,
    check_alone,
)
from pdmesh.services.gateway.openai.schema import ChatCompletionRequest
from pdmesh.services.gateway.openai.tools import (
    FunctionDefinition,
    FunctionName,
    NamedTool,
    Tool,
)
from pdmesh.services.gateway.openai.translated import TranslatedChat
from pdmesh.services.gateway.request.answer_form import JsonSchemaFormat, ResponseFormat

_BLOCK_CONTENT: Final = ("text", "source", "content", "input", "thinking")
_SOURCE_CONTENT: Final = ("data", "url", "file_id", "content")
_FORMATS: Final = {f"image/{name}": name for name in ("jpeg", "png", "gif", "webp")}


def has_later_system(request: CountTokensRequest) -> bool:
    """Whether `messages` has system messages. Not all chat templates accept them there."""
    return any(message.role == "system" for message in request.messages)


def chat_of(request: CountTokensRequest, *, merges_system: bool = False) -> TranslatedChat:
    """With `merges_system`, later system messages become part of the first one.

    Raises InvalidRequest with the field of `request`.
    """
    conversation = _Conversation()
    conversation.add_system(list(_system_texts(request, merges_system=merges_system)), "system")
    for index, message in enumerate(request.messages):
        if not (merges_system and message.role == "system"):
            conversation.add(message, f"messages[{index}]")
    names = conversation.names
    chat = ChatCompletionRequest(model=request.model, messages=conversation.messages)
    chat.chat_template_kwargs = request.chat_template_kwargs
    if request.tools:
        chat.tools = [_tool(tool, f"tools[{at}]") for at, tool in enumerate(request.tools)]
        for at in range(len(request.tools)):
            names[f"tools[{at}].function"] = f"tools[{at}]"
            names[f"tools[{at}].function.parameters"] = f"tools[{at}].input_schema"
    if request.tool_choice is not None:
        _choose(chat, request.tool_choice)
        names["tool_choice.function"] = "tool_choice"
    _set_output(chat, request, names)
    if isinstance(request, MessagesRequest):
        _set_sampling(chat, request)
        names["stop"] = "stop_sequences"
    return TranslatedChat(chat, names)


def _set_sampling(chat: ChatCompletionRequest, request: MessagesRequest) -> None:
    chat.max_tokens = request.max_tokens
    chat.stop = request.stop_sequences
    chat.stream = request.stream
    chat.temperature = request.temperature
    chat.top_p = request.top_p
    chat.top_k = request.top_k
    chat.seed = request.seed
    chat.ignore_eos = request.ignore_eos
    chat.cache_salt = request.cache_salt
    chat.chat_id = request.chat_id
    chat.scenario = request.scenario
    chat.session = request.session


def _set_output(
    chat: ChatCompletionRequest, request: CountTokensRequest, names: dict[str, str]
) -> None:
    config, thinking = request.output_config, request.thinking
    if config is not None and config.effort is not None:
        chat.reasoning_effort = config.effort
    if config is not None and config.format is not None:
        form = config.format
        if not isinstance(form, dict) or form.get("type") != "json_schema":
            raise unsupported("output_config.format")
        schema = form.get("schema")
        if not isinstance(schema, dict):
            message = "output_config.format.schema must be a JSON schema"
            raise InvalidRequest(message, field="output_config.format.schema")
        chat.response_format = ResponseFormat("json_schema", JsonSchemaFormat(schema=schema))
        names["response_format"] = "output_config.format"
        names["response_format.json_schema.schema"] = "output_config.format.schema"
    if thinking is not None and thinking.type == "disabled":
        chat.reasoning_effort = "none"
    elif thinking is not None and thinking.type == "enabled":
        chat.thinking_token_budget = thinking.budget_tokens
        names |= {"thinking_token_budget": "thinking.budget_tokens"}


def _tool(tool: MessagesTool, where: str) -> Tool:
    if tool.type not in (None, "custom"):
        raise unsupported(f"{where}.type")
    if tool.input_schema is None:
        raise _missing(f"{where}.input_schema")
    parameters = {**tool.input_schema, "type": tool.input_schema.get("type", "object")}
    return Tool(function=FunctionDefinition(tool.name, tool.description, parameters, tool.strict))


def _choose(chat: ChatCompletionRequest, choice: MessagesToolChoice) -> None:
    if choice.disable_parallel_tool_use is not None:
        chat.parallel_tool_calls = not choice.disable_parallel_tool_use
    match choice.type:
        case "any":
            chat.tool_choice = "required"
        case "tool":
            if not choice.name:
                raise _missing("tool_choice.name")
            chat.tool_choice = NamedTool(FunctionName(choice.name))
        case kind:
            chat.tool_choice = kind


def _system_texts(request: CountTokensRequest, *, merges_system: bool) -> Iterator[str]:
    if isinstance(request.system, str):
        # Like vLLM, keep the text of a string. Rendering leaves out only the billing line in it.
        yield request.system
    elif request.system:
        yield from _without_billing(request.system, "system")
    if merges_system:
        for index, message in enumerate(request.messages):
            if message.role == "system":
                yield from _without_billing(message.content, f"messages[{index}].content")


class _Conversation:
    """The chat's messages. `names` maps paths in the chat to paths in the request, for errors."""

    def __init__(self) -> None:
        self.messages: list[ChatMessage] = []
        self.names: dict[str, str] = {}

    def _append(self, message: ChatMessage, where: str) -> str:
        known = f"messages[{len(self.messages)}]"
        self.names[known] = where
        self.messages.append(message)
        return known

    def add_system(self, texts: Sequence[str], where: str) -> None:
        if text := "".join(texts):
            self._append(ChatMessage("system", text), where)

    def add(self, message: InputMessage, where: str) -> None:
        if message.role == "system":
            self.add_system(list(_without_billing(message.content, f"{where}.content")), where)
        elif isinstance(message.content, str):
            self._append(ChatMessage(message.role, message.content), where)
        elif message.role == "user":
            self._add_user(message.content, where)
        else:
            self._add_assistant(message.content, where)

    def _add_user(self, blocks: Sequence[MessageBlock], where: str) -> None:
        """Add a user's blocks: first the results of tools, then the user's own text and images."""
        parts: list[ContentPart] = []
        places: list[str] = []
        for at, block in enumerate(blocks):
            place = f"{where}.content[{at}]"
            if block.type == "tool_result":
                self._add_result(block, place)
                continue
            if block.type == "image":
                parts.append(_image(block, place))
            elif text := _text_of(block, place):
                parts.append(ContentPart("text", text))
            else:
                continue
            places.append(place)
        if not parts:
            return
        known = self._append(ChatMessage("user", _content(parts)), where)
        for number, (part, place) in enumerate(zip(parts, places, strict=True)):
            if part.type == "image_url":
                known_part = f"{known}.content[{number}]"
                source = "data" if isinstance(part, ImageFile) else "url"
                self.names[known_part] = place
                self.names[f"{known_part}.image_url"] = f"{place}.source.{source}"
                self.names[f"{known_part}.media_type"] = f"{place}.source.media_type"

    def _add_result(self, block: MessageBlock, where: str) -> None:
        text = "\n".join(_texts(block.content or "", f"{where}.content"))
        known = self._append(ChatMessage("tool", text, tool_call_id=block.tool_use_id), where)
        self.names[f"{known}.tool_call_id"] = f"{where}.tool_use_id"

    def _add_assistant(self, blocks: Sequence[MessageBlock], where: str) -> None:
        parts: list[ContentPart] = []
        reasoning: list[str] = []
        calls: list[ToolCall] = []
        places: list[str] = []
        for at, block in enumerate(blocks):
            place = f"{where}.content[{at}]"
            if block.type == "tool_use":
                calls.append(_call(block))
                places.append(place)
            elif block.type == "thinking":
                reasoning.append(block.thinking or "")
            elif block.type == "redacted_thinking":
                continue  # only the server that wrote this block can read it
            elif text := _text_of(block, place):
                parts.append(ContentPart("text", text))
        message = ChatMessage("assistant", _content(parts) if parts else None)
        message.tool_calls = calls or None
        message.reasoning = "".join(reasoning) or None
        known = self._append(message, where)
        for number, place in enumerate(places):
            call = f"{known}.tool_calls[{number}]"
            self.names[call] = self.names[f"{call}.function"] = place
            self.names[f"{call}.function.arguments"] = f"{place}.input"


def _call(block: MessageBlock) -> ToolCall:
    arguments = msgspec.json.encode(block.input or {}).decode()
    return ToolCall(CalledFunction(block.name or "", arguments), block.id or "")


def _image(block: MessageBlock, where: str) -> ContentPart:
    check_alone(block, "source", _BLOCK_CONTENT, where)
    where, source = f"{where}.source", block.source
    if source is None:
        raise _missing(where)
    match source.type:
        case "base64":
            check_alone(source, "data", _SOURCE_CONTENT, where)
            if not source.data:
                raise _missing(f"{where}.data")
            return ImageFile("image_url", base64=source.data, format=_format_of(source, where))
        case "url":
            check_alone(source, "url", (*_SOURCE_CONTENT, "media_type"), where)
            if not source.url:
                raise _missing(f"{where}.url")
            return ContentPart("image_url", image_url=source.url)
        case _:
            message = f"{where}.type: the source of an image is base64 or url"
            raise InvalidRequest(message, reason="UNSUPPORTED_FIELD", field=f"{where}.type")


def _format_of(source: ImageSource, where: str) -> str:
    """The image format of the media type, or an empty string if the source has no media type."""
    if source.media_type is None:
        return ""
    if (found := _FORMATS.get(source.media_type)) is None:
        field = f"{where}.media_type"
        raise InvalidRequest(f"{field} must be one of {', '.join(_FORMATS)}", field=field)
    return found


def _content(parts: list[ContentPart]) -> str | list[ContentPart]:
    is_text = len(parts) == 1 and parts[0].type == "text"
    return (parts[0].text or "") if is_text else parts


def _texts(content: str | Sequence[MessageBlock], where: str) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    else:
        for at, block in enumerate(content):
            yield _text_of(block, f"{where}[{at}]")


def _without_billing(content: str | Sequence[MessageBlock], where: str) -> Iterator[str]:
    """The texts that do not begin with an agent's billing line. Like vLLM, drop them whole."""
    return (text for text in _texts(content, where) if not text.startswith(BILLING_LINE))


def _text_of(block: MessageBlock, where: str) -> str:
    if block.type != "text":
        field = f"{where}.type"
        message = f"{field}: blocks of type {block.type[:32]} are not supported here"
        raise InvalidRequest(message, reason="UNSUPPORTED_FIELD", field=field)
    if block.text is None:
        raise _missing(f"{where}.text")
    check_alone(block, "text", _BLOCK_CONTENT, where)
    return block.text


def _missing(field: str) -> InvalidRequest:
    return InvalidRequest(f"missing field: {field}", reason="MISSING_FIELD", field=field)
