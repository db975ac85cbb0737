"""Converts the JSON schema of a tool's arguments to rules of a grammar in Lark, for calls in XML.

Some families of models write each argument between marks of their own. A text is written as it is,
and any other value as JSON. The parsers of these models find the marks in the answer, and convert
each value to the type in its schema. The rules allow only arguments that a parser reads back
unchanged. So a text contains no mark, and the schema has only types that the parsers recognise. Any
other schema is refused. It is never replaced by a looser one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from pdmesh.core.sampling.lark import LarkRules, regex

# Parsed JSON. Its values are Any, and each function below reads the parts that it needs.
_Schema = Mapping[str, Any]

_DSML: Final = "\uff5cDSML\uff5c"
_KEY: Final = re.compile(r"[\w.$:-]+")
_ANY_KEY: Final = "/[a-zA-Z_][a-zA-Z0-9_.-]*/"
_ANY_TEXT: Final = "(?s:.*)"
# Only numbers that fit a double, because parsers treat a larger number as text.
_NUMBER: Final = regex(r"-?(0|[1-9][0-9]{0,20})(\.[0-9]{1,20})?([eE][+-]?[0-9]{1,2})?")
_MAX_PROPERTIES: Final = 256
_MAX_DEPTH: Final = 8
_ALTERNATIVES: Final = ("anyOf", "oneOf", "allOf")
_DEFINITIONS: Final = ("$defs", "definitions")
_NOTES: Final = frozenset(
    {"title", "description", "default", "examples", "deprecated", "$comment", "$schema", "$id"}
)
_OF_OBJECT: Final = _NOTES | {
    "type", "properties", "required", "additionalProperties", *_DEFINITIONS,
}  # fmt: skip
_OF_TEXT: Final = frozenset({"minLength", "maxLength", "pattern", "format"})
_DATE: Final = "[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])"
_HOURS: Final = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME: Final = rf"{_HOURS}:[0-5][0-9](\.[0-9]{{1,6}})?(Z|[+-]{_HOURS})"
_BYTE: Final = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
# As in JSON Schema, a format that is not listed here constrains nothing.
_FORMATS: Final = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    "ipv4": rf"({_BYTE}\.){{3}}{_BYTE}",
    "email": r"[a-zA-Z0-9_+-]{1,64}@([a-zA-Z0-9]{1,63}\.)+[a-zA-Z]{2,24}",
}


class NoXmlGrammar(ValueError):
    """The schema has a part that a parser would not read back, or for which there is no rule."""


@dataclass(frozen=True, slots=True)
class _Style:
    """How a family of models writes arguments. `open` and `close` enclose a value.

    In `open`, KEY is the argument's name, KIND tells whether the value is a text, and LINE is an
    optional line break. `marks` is a regular expression for everything that a parser reads as a
    mark. `before` and `after` enclose each argument. `at_end` follows the last argument.
    """

    open: str
    close: str
    marks: str
    before: str = ""
    after: str = ""
    at_end: str = ""
    is_read_deeply: bool = False  # the parser also converts values within objects and lists


_LINE: Final = '"\\n"'
_QWEN: Final = _Style(
    "<parameter=KEY>",
    "</parameter>",
    r"<\s*parameter\s*=|<\s*/\s*parameter\s*>|</function>|</?tool_call>",
)
# Qwen's own template puts each mark and value on its own line. Other models that use Qwen's marks
# do not.
_QWEN_IN_LINES: Final = replace(
    _QWEN, open="<parameter=KEY>\n", close="\n</parameter>", after=_LINE
)
_DEEPSEEK: Final = _Style(
    f'<{_DSML}parameter name="KEY" string="KIND">',
    f"</{_DSML}parameter>",
    f"</?{_DSML}",
    after=_LINE,
    is_read_deeply=True,
)
_STYLES: Final = {
    "qwen_xml": _QWEN,
    "minimax_xml": _Style(
        '<parameter name="KEY">',
        "</parameter>",
        r"<\s*parameter\s+name\s*=|<\s*/\s*parameter\s*>|</invoke>|</?minimax:tool_call>",
        after=_LINE,
    ),
    "deepseek_xml": _DEEPSEEK,
    "deepseek_v4_1_xml": replace(
        _DEEPSEEK,
        open=f'<{_DSML} parameter name="KEY" string="KIND">',
        close=f"</{_DSML} parameter>",
    ),
    "glm_xml": _Style(
        "<arg_key>KEY</arg_key>LINE<arg_value>",
        "</arg_value>",
        "</?(arg_key|arg_value|tool_call)>",
        before=f"{_LINE}?",
        at_end=f"{_LINE}?",
    ),
}
STYLES: Final = frozenset(_STYLES)


def xml_arguments(schema: _Schema | bool, style: str, end: str, rules: LarkRules) -> str:
    """The expression for a call's arguments, including `end` after them. Raises NoXmlGrammar."""
    form = _STYLES[style]
    if form is _QWEN and end.startswith("\n"):
        form, end = _QWEN_IN_LINES, end[1:]
    root = schema if isinstance(schema, Mapping) else {}
    return _joined(*_Writer(form, root, rules).arguments(schema), form.at_end, rules.literal(end))


class _Writer:
    def __init__(self, style: _Style, root: _Schema, rules: LarkRules) -> None:
        self._style, self._root, self._rules = style, root, rules

    def arguments(self, schema: _Schema | bool) -> list[str]:
        if not isinstance(schema, Mapping):
            return [self._any_arguments()]
        _refuse_others(schema, _OF_OBJECT, "the parameters")
        properties, required = schema.get("properties") or {}, schema.get("required") or []
        others = schema.get("additionalProperties", True)
        is_object = schema.get("type", "object") == "object"
        if not (is_object and isinstance(properties, Mapping) and isinstance(required, list)):
            raise NoXmlGrammar("the parameters are not an object")
        if any(name not in properties for name in required):
            raise NoXmlGrammar("a required parameter has no schema")
        if len(properties) > _MAX_PROPERTIES:
            raise NoXmlGrammar(f"more than {_MAX_PROPERTIES} parameters")
        if not properties and others is not False:
            if others not in (True, {}):
                raise NoXmlGrammar("no grammar for additionalProperties of the parameters")
            return [self._any_arguments()]
        return [
            self._argument(name, each) + ("" if name in required else "?")
            for name, each in properties.items()
        ]

    def _argument(self, name: str, schema: _Schema | bool) -> str:
        if not _KEY.fullmatch(name):
            raise NoXmlGrammar(f"no grammar for a parameter named {name[:64]!r}")
        values = self._values(schema)
        return self._rules.rule(
            " | ".join(self._framed(self._rules.literal(name), *each) for each in values)
        )

    def _any_arguments(self) -> str:
        return f"{self._rules.rule(self._framed(_ANY_KEY, True, self._text({})))}*"

    def _framed(self, key: str, is_text: bool, value: str) -> str:
        form = self._style
        opened = form.open.replace("KIND", "true" if is_text else "false")
        variable = {"KEY": key, "LINE": f"{_LINE}?"}
        parts = (
            variable.get(part) or self._rules.literal(part)
            for part in re.split("(KEY|LINE)", opened)
        )
        return _joined(form.before, *parts, value, form.after)

    def _values(self, schema: _Schema | bool) -> list[tuple[bool, str]]:
        """The ways to write a value: (whether as a text, the rule with the closing mark)."""
        given = {} if schema is True else schema
        if not isinstance(given, Mapping):
            raise NoXmlGrammar("a parameter that may have no value")
        schema = self._resolved(given)
        types = _types(schema)
        close = self._rules.literal(self._style.close)
        if "string" not in types:
            return [(False, f"{self._json(schema)} {close}")]
        if schema.keys() - _NOTES <= {"type"}:
            return [(True, self._text({}))]  # valid, whichever of the types the parser chooses
        if types == {"string"}:
            return [(True, self._text_of(schema))]
        if types == {"string", "null"}:
            return [(True, self._text_of(self._not_null(schema))), (False, f'"null" {close}')]
        raise NoXmlGrammar("no grammar for a parameter that is a text or something else")

    def _resolved(self, schema: _Schema) -> _Schema:
        """The schema, or the one to which its reference leads.

        A reference must lead to the schema of a text, since parsers treat each reference as a text.
        """
        for _ in range(_MAX_DEPTH):
            reference = schema.get("$ref")
            if reference is None:
                return schema
            found: Any = self._root
            for part in str(reference).removeprefix("#/").split("/"):
                found = found.get(part) if isinstance(found, Mapping) else None
            if not isinstance(found, Mapping) or "$ref" in found or _types(found) != {"string"}:
                raise NoXmlGrammar("no grammar for a $ref to anything but a text")
            schema = found
        raise NoXmlGrammar("a $ref that does not end")

    def _not_null(self, schema: _Schema) -> _Schema:
        """The schema without null as a possible value."""
        for name in _ALTERNATIVES:
            if name in schema:
                listed = [each for each in schema[name] if isinstance(each, Mapping)]
                texts = [each for each in listed if each.get("type") != "null"]
                if len(texts) != 1 or schema.keys() - _NOTES != {name} or name == "allOf":
                    raise NoXmlGrammar(f"no grammar for this {name} of a parameter")
                return self._resolved(texts[0])
        if not isinstance(schema.get("enum"), list):
            return schema
        return {**schema, "enum": [each for each in schema["enum"] if each is not None]}

    def _text_of(self, schema: _Schema) -> str:
        _refuse_others(schema, _NOTES | _OF_TEXT | {"type", "enum", "const"}, "a parameter")
        choices = [schema["const"]] if "const" in schema else schema.get("enum")
        if choices is None:
            return self._text(schema)
        if not isinstance(choices, list) or schema.keys() & _OF_TEXT:
            raise NoXmlGrammar("no grammar for this enum of a parameter")
        for choice in choices:
            is_read = isinstance(choice, str) and choice.lower() != "null"
            if not is_read or re.search(self._style.marks, choice):
                raise NoXmlGrammar("no grammar for this value of an enum")
        either = self._rules.rule(" | ".join(map(self._rules.literal, choices)))
        return f"{either} {self._rules.literal(self._style.close)}"

    def _text(self, schema: _Schema) -> str:
        least, most = _length(schema, "minLength"), _length(schema, "maxLength")
        bound = "*" if least is most is None else f"{{{least or 0},{'' if most is None else most}}}"
        parts = [
            regex(f"(?s:.){bound}"),
            f"~{regex(f'{_ANY_TEXT}({self._style.marks}){_ANY_TEXT}')}",
        ]
        if "pattern" in schema:
            parts.append(regex(_searched(schema["pattern"])))
        if (form := _FORMATS.get(str(schema.get("format")))) is not None:
            parts.append(regex(form))
        terminal = self._rules.terminal(" & ".join(parts))
        return self._rules.until(terminal, self._style.close)

    def _json(self, schema: _Schema) -> str:
        if schema.keys() - _NOTES == {"type"} and schema["type"] == "number":
            return _NUMBER
        if self._style.is_read_deeply and _has_untyped(schema, _MAX_DEPTH):
            raise NoXmlGrammar("no grammar for $ref or const within a parameter")
        definitions = {name: self._root[name] for name in _DEFINITIONS if name in self._root}
        return f"%json {json.dumps({**definitions, **schema})}"


def _refuse_others(schema: _Schema, known: frozenset[str], where: str) -> None:
    if others := sorted(schema.keys() - known):
        raise NoXmlGrammar(f"no grammar for {others[0][:64]!r} of {where}")


def _types(schema: _Schema) -> set[str]:
    """The types as parsers see them. A schema without a type is a text to them."""
    given = schema.get("type")
    found = {each for each in (given if isinstance(given, list) else [given]) if each}
    enum = schema.get("enum")
    found |= {_type_of(each) for each in (enum if isinstance(enum, list) else ())}
    for name in _ALTERNATIVES:
        listed = schema.get(name)
        for each in listed if isinstance(listed, list) else ():
            found |= _types(each) if isinstance(each, Mapping) else {"string"}
    return found or {"string"}


def _type_of(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def _has_untyped(schema: object, depth: int) -> bool:
    """Whether a parser that converts nested values might treat a value within `schema` as text."""
    if isinstance(schema, Mapping):
        found = depth == 0 or "$ref" in schema or "const" in schema
        return found or any(_has_untyped(each, depth - 1) for each in schema.values())
    if isinstance(schema, Sequence) and not isinstance(schema, str):
        return depth == 0 or any(_has_untyped(each, depth - 1) for each in schema)
    return False


def _length(schema: _Schema, name: str) -> int | None:
    value = schema.get(name)
    if value is not None and (type(value) is not int or value < 0):
        raise NoXmlGrammar(f"{name} of a parameter is not a number of characters")
    return value


def _searched(pattern: object) -> str:
    """A regular expression of all texts in which the pattern is found."""
    if not isinstance(pattern, str):
        raise NoXmlGrammar("pattern of a parameter is not text")
    body = pattern.removeprefix("^")
    is_ended = bool(re.search(r"(?<!\\)(\\\\)*\$$", body))
    body = body[:-1] if is_ended else body
    depth, in_class = 0, False
    for found in re.finditer(r"\\.|.", body, re.DOTALL):
        char = found.group()
        in_class = char == "[" or (in_class and char != "]")
        depth += 0 if in_class else (char == "(") - (char == ")")
        is_top = depth == 0 and char == "|" and len(body) < len(pattern)
        if not in_class and (char in ("^", "$", "\\b", "\\B") or is_top):
            raise NoXmlGrammar(f"no grammar for {char!r} within the pattern of a parameter")
    before = _ANY_TEXT * (not pattern.startswith("^"))
    return f"{before}({body}){_ANY_TEXT * (not is_ended)}"


def _joined(*parts: str) -> str:
    return " ".join(part for part in parts if part)
