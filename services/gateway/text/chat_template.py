"""Turns a conversation into a prompt with the model's own template, in a sandbox.

The template comes from the model directory, never from a client. The template runs in jinja's
immutable sandbox, with the same functions and variables as in Hugging Face's library. A
conversation is refused if its prompt has more than `max_chars` characters.

Some templates read a message's content as text, some as a list of parts, and some as either. To
find out, each template is tried with both forms when it is loaded. As in vLLM, a template that can
read parts gets parts. Other templates get one text with a line for each part. An image is a part
without text, or a line with its placeholder.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import msgspec

from pdmesh.errors import InvalidRequest

# Errors that a template may raise if it was not written for this kind of conversation.
_TEMPLATE_FAULTS: Final = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
    RecursionError,
)
_TRIED_TEXTS: Final = ("pdmesh-first", "pdmesh-second")
# Marks the end of the final message in the prompt. A template may remove the tag's last space.
_END_TAG: Final = "CONTINUE_FINAL_MESSAGE_TAG "
# A further key of the tried parts. The prompt has it only if the template prints parts as a whole.
_TRIED_KEY: Final = "pdmesh-key"

# The names of templates in a model directory.
DEFAULT: Final = "default"
WITH_TOOLS: Final = "tool_use"
# `role` is a string. `content` is a string, or a sequence of strings, one for each part. Further
# fields have the form that templates expect.
Message = Mapping[str, object]


class ImageMark(str):
    """A part of a message that stands for an image. The text is the model's placeholder."""

    __slots__ = ()


# The renderer itself sets these variables of a template, so clients must not set them.
RESERVED_VARIABLES: Final = frozenset(
    (
        "messages", "conversation", "tools", "documents", "chat_template", "tokenize",
        "add_generation_prompt", "continue_final_message",
    )
)  # fmt: skip


class Conversation(msgspec.Struct, frozen=True):
    """The source of a prompt.

    `variables` are the template variables that the client set. With `add_generation_prompt`, the
    prompt ends with the beginning of the model's message. With `continue_final_message`, the prompt
    ends with the text of the final message, so that the model continues this text.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, object]] | None = None
    variables: Mapping[str, object] = MappingProxyType({})
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class ChatTemplate:
    """One template of a model.

    `special_tokens` are keyed by the names that templates use, for example bos_token. The
    constructor raises jinja2.TemplateError.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], max_chars: int) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlocks, jinja2.ext.loopcontrols],
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _strftime_now
        # The variables that the template reads and that clients may set.
        found = jinja2.meta.find_undeclared_variables(environment.parse(source))
        self._variables = found - environment.globals.keys() - RESERVED_VARIABLES
        self._template = environment.from_string(source)
        # jinja copies the globals for each rendering. A plain dict is copied in a tenth of the time
        # that jinja's chain of maps takes.
        self._template.globals = dict(self._template.globals)
        self._special_tokens = dict(special_tokens)
        self._max_chars = max_chars
        self._knows_developer = "'developer'" in source or '"developer"' in source
        self._reads_parts = self._shows([{**p, _TRIED_KEY: ""} for p in _parts(_TRIED_TEXTS)])
        self._reads_text = not self._reads_parts or self._shows("".join(_TRIED_TEXTS))

    def render(self, conversation: Conversation) -> str:
        """Make the prompt.

        Raises InvalidRequest if the template refuses the conversation, or if the prompt is too
        long.
        """
        messages = conversation.messages
        if conversation.continue_final_message:
            messages = [*messages[:-1], _tagged(messages[-1])]
        if not self._knows_developer and "developer" in [m["role"] for m in messages]:
            messages = _with_one_system([{**m, "role": _undeveloped(m["role"])} for m in messages])
        given = conversation.variables
        text = self._render(
            [{**m, "content": self._as_read(m)} for m in messages],
            conversation.tools,
            {name: given[name] for name in given.keys() & self._variables} if given else given,
            add_generation_prompt=conversation.add_generation_prompt,
        )
        return _open_ended(text) if conversation.continue_final_message else text

    def _as_read(self, message: Message) -> str | list[dict[str, str]]:
        content = message["content"]
        if isinstance(content, str):
            is_text = self._reads_text or message["role"] == "tool"
            return content if is_text else _parts((content,))
        assert isinstance(content, list | tuple)
        # All templates take the result of a tool as text.
        is_parts = self._reads_parts and message["role"] != "tool"
        return _parts(content) if is_parts else _text_of(content)

    def _shows(self, content: object) -> bool:
        """Whether the template prints the texts of this content, but not the raw data structure."""
        try:
            text = self._render([{"role": "user", "content": content}])
        except InvalidRequest:
            return False
        return all(tried in text for tried in _TRIED_TEXTS) and _TRIED_KEY not in text

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, object]] | None = None,
        variables: Mapping[str, object] = MappingProxyType({}),
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        parts: list[str] = []
        num_chars = 0
        try:
            for part in self._template.generate(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **{**self._special_tokens, **variables},
            ):
                parts.append(part)
                num_chars += len(part)
                if num_chars > self._max_chars:
                    raise InvalidRequest("the conversation is too long", field="messages")
        except _TEMPLATE_FAULTS as exc:
            raise InvalidRequest(
                f"the model's chat template refuses this conversation: {_reason(exc)}",
                field="messages",
            ) from exc
        return "".join(parts)


def _tagged(message: Message) -> Message:
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": content + _END_TAG}
    assert isinstance(content, list | tuple)
    if not content:
        raise InvalidRequest("the final message has no text to continue", field="messages")
    return {**message, "content": [*content[:-1], content[-1] + _END_TAG]}


def _open_ended(text: str) -> str:
    """Cut the prompt at the end of the final message, as Hugging Face's library does."""
    at = text.rfind(_END_TAG.strip())
    if at < 0:
        message = "the model's chat template leaves out the final message, so it cannot go on"
        raise InvalidRequest(message, field="continue_final_message")
    return text[:at] if text.startswith(_END_TAG, at) else text[:at].rstrip()


def _undeveloped(role: object) -> object:
    return "system" if role == "developer" else role


def _with_one_system(messages: Sequence[Message]) -> Sequence[Message]:
    """Join all system messages into one at the beginning, because many templates need this."""
    if all(m["role"] != "system" for m in messages[1:]):
        return messages
    texts = [_text_of(m["content"]) for m in messages if m["role"] == "system"]
    merged: Message = {"role": "system", "content": "\n\n".join(filter(None, texts))}
    return [merged, *(m for m in messages if m["role"] != "system")]


def _text_of(content: object) -> str:
    """The content as one text. As in vLLM, images come before text."""
    if not isinstance(content, list | tuple):
        return str(content)
    return "\n".join(sorted(content, key=lambda part: not isinstance(part, ImageMark)))


class ChatTemplates:
    """A model's templates. Some models have a separate template for conversations with tools."""

    def __init__(self, plain: ChatTemplate, with_tools: ChatTemplate) -> None:
        self._plain = plain
        self._with_tools = with_tools

    @classmethod
    def of(
        cls, sources: Mapping[str, str], special_tokens: Mapping[str, str], max_chars: int
    ) -> ChatTemplates:
        """Raises jinja2.TemplateError."""
        plain = ChatTemplate(sources[DEFAULT], special_tokens, max_chars)
        if not (source := sources.get(WITH_TOOLS)):
            return cls(plain, plain)
        return cls(plain, ChatTemplate(source, special_tokens, max_chars))

    def render(self, conversation: Conversation) -> str:
        """Raises InvalidRequest."""
        template = self._plain if conversation.tools is None else self._with_tools
        return template.render(conversation)

    @cached_property
    def takes_later_system(self) -> bool:
        """Whether all templates accept a system message after the first message."""
        messages = [{"role": role, "content": "t"} for role in ("system", "user") * 2]
        for tools in (None, ()):
            try:
                self.render(Conversation(messages, tools))
            except InvalidRequest:
                return False
        return True


class _GenerationBlocks(jinja2.ext.Extension):
    """Accepts `{% generation %}`, which marks the model's text for training, and ignores it."""

    tags = {"generation"}  # noqa: RUF012 - as jinja declares it

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=lineno)


def _parts(texts: Sequence[str]) -> list[dict[str, str]]:
    return [
        {"type": "image"} if isinstance(text, ImageMark) else {"type": "text", "text": text}
        for text in texts
    ]


class _Refused(jinja2.TemplateError):
    """The template called raise_exception."""


def _reason(exc: Exception) -> str:
    return str(exc) if isinstance(exc, _Refused) else type(exc).__name__


def _raise(message: str) -> NoReturn:
    raise _Refused(message)


# The types are Any because json.dumps checks its arguments itself.
def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _strftime_now(form: str) -> str:
    return datetime.datetime.now(tz=datetime.UTC).strftime(form)
