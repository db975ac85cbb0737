"""Turns a conversation into a prompt with the model's own template, in a sandbox.

The template comes from the model directory, never from a client. It runs in jinja's immutable sandbox with the
functions Hugging Face gives it, and its output is cut off at a bound.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Final, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox

from pdmesh.errors import InvalidRequest

# What a template can raise on a conversation it was not written for.
_TEMPLATE_FAULTS: Final = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
)


class ChatTemplate:
    """`special_tokens` are the names templates use: bos_token, eos_token, ..."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], max_chars: int) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _strftime_now
        self._template = environment.from_string(source)
        # As a plain dict: jinja copies it for each rendering, and its chain of maps costs ten times as much to copy.
        self._template.globals = dict(self._template.globals)
        self._special_tokens = dict(special_tokens)
        self._max_chars = max_chars

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Raises InvalidRequest if the template refuses the conversation or it gets too long."""
        parts: list[str] = []
        num_chars = 0
        try:
            for part in self._template.generate(
                messages=messages, add_generation_prompt=True, **self._special_tokens
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


class _Refused(jinja2.TemplateError):
    """The template called raise_exception."""


def _reason(exc: Exception) -> str:
    return str(exc) if isinstance(exc, _Refused) else type(exc).__name__


def _raise(message: str) -> NoReturn:
    raise _Refused(message)


def _tojson(value: object, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now(tz=datetime.UTC).strftime(form)
