"""Turns a conversation into a prompt with the model's own template, in a sandbox.

The template comes from the model directory, never from a client. It runs in jinja's immutable
sandbox, with the functions and variables that Hugging Face gives it. A conversation whose prompt
has more than `max_chars` characters is refused.

Some templates read a message's content as text, some as a list of parts, and some as either. When a
template is loaded, it is tried with both forms. As in plain vLLM, it gets parts if it reads parts,
and otherwise one text with a line for each part. An image is a part without text. A template also
gets the tools, and the client's variables that it reads, except those that the renderer sets.
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

# The errors of a template that was not written for such a conversation.
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
# Marks where the final message ends in the prompt. A template may trim the tag's space.
_END_TAG: Final = "CONTINUE_FINAL_MESSAGE_TAG "
# Appears only if the template prints a part as a whole instead of its text.
_TRIED_KEY: Final = "pdmesh-key"

# The names of templates in a model directory.
DEFAULT: Final = "default"
WITH_TOOLS: Final = "tool_use"
# `role` is text. `content` is text, or the texts of its parts. Further fields are in the form that
# templates expect.
Message = Mapping[str, object]


class ImageMark(str):
    """The part of a message that an image takes: the model's placeholder, as text."""

    __slots__ = ()


# The renderer itself sets these variables of a template, so clients must not.
RESERVED_VARIABLES: Final = frozenset(
    (
        "messages", "conversation", "tools", "documents", "chat_template", "tokenize",
        "add_generation_prompt", "continue_final_message",
    )
)  # fmt: skip


class Conversation(msgspec.Struct, frozen=True):
    """The source of a prompt. `variables`: the template variables that the client set.

    The prompt ends with the beginning of the model's message (`add_generation_prompt`), or within
    the final message (`continue_final_message`).
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, object]] | None = None
    variables: Mapping[str, object] = MappingProxyType({})
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class ChatTemplate:
    """`special_tokens` are named as in templates, for example bos_token.

    Raises jinja2.TemplateError.
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
        # The names that the template reads and that only a client can set.
        found = jinja2.meta.find_undeclared_variables(environment.parse(source))
        self._variables = found - environment.globals.keys() - RESERVED_VARIABLES
        self._template = environment.from_string(source)
        # jinja copies the globals for each rendering. Copying a plain dict costs a tenth of copying
        # jinja's own chain of maps.
        self._template.globals = dict(self._template.globals)
        self._special_tokens = dict(special_tokens)
        self._max_chars = max_chars
        self._knows_developer = "'developer'" in source or '"developer"' in source
        self._reads_parts = self._shows([{**p, _TRIED_KEY: ""} for p in _parts(_TRIED_TEXTS)])
        self._reads_text = not self._reads_parts or self._shows("".join(_TRIED_TEXTS))

    def render(self, conversation: Conversation) -> str:
        """Raises InvalidRequest if the template refuses the conversation or the prompt gets too
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
        """Whether the template prints the texts of this content and not its raw form."""
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
    """The prompt up to the end of the final message, as Hugging Face cuts it."""
    at = text.rfind(_END_TAG.strip())
    if at < 0:
        message = "the model's chat template leaves out the final message, so it cannot go on"
        raise InvalidRequest(message, field="continue_final_message")
    return text[:at] if text.startswith(_END_TAG, at) else text[:at].rstrip()


def _undeveloped(role: object) -> object:
    return "system" if role == "developer" else role


def _with_one_system(messages: Sequence[Message]) -> Sequence[Message]:
    """Join all system messages into the first: many templates accept only one, at the beginning."""
    if all(m["role"] != "system" for m in messages[1:]):
        return messages
    texts = [_text_of(m["content"]) for m in messages if m["role"] == "system"]
    merged: Message = {"role": "system", "content": "\n\n".join(filter(None, texts))}
    return [merged, *(m for m in messages if m["role"] != "system")]


def _text_of(content: object) -> str:
    """The content as one text. As in plain vLLM, images come before text."""
    if not isinstance(content, list | tuple):
        return str(content)
    return "\n".join(sorted(content, key=lambda part: not isinstance(part, ImageMark)))


class ChatTemplates:
    """A model's templates. Some models have a separate one for conversations with tools."""

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


# Any: json.dumps checks its own arguments.
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
