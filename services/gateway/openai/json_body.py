"""Parses the JSON body of a request into a struct, within bounds. Errors name the invalid field.

A body with a duplicate field, or with a string that contains U+0000, is refused. An unknown field
is refused, or left out and reported by name.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from typing import Any, Final, TypeVar

import msgspec

from pdmesh.errors import InvalidRequest, shortened
from pdmesh.services.gateway.openai.json_bounds import SMALL_BYTES, outline
from pdmesh.services.gateway.openai.unknown_fields import Nested, without_unknown
from pdmesh.services.gateway.request.bounds import nul_refused

# The beginnings of msgspec's messages that name a field.
_UNKNOWN: Final = "Object contains unknown field `"
_NAMES_A_FIELD: Final = {
    _UNKNOWN: "UNKNOWN_FIELD",
    "Object missing required field `": "MISSING_FIELD",
}
_MAX_EXPLAINED: Final = 256
_ANY_KEY: Final = "[...]"
_KINDS: Final = {
    b'"': "str", b"{": "object", b"[": "array", b"t": "bool", b"f": "bool", b"n": "null",
}  # fmt: skip
_fields: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_GOT: Final = re.compile(r"got `(\w+)`")

T = TypeVar("T", bound=msgspec.Struct)
# A JSON object, with values of any type.
Object = dict[str, Any]
_object: Final = msgspec.json.Decoder(Object)


def decoded(
    decoder: msgspec.json.Decoder[T], nested: Nested, body: bytes, ignored: list[str] | None
) -> T:
    """Raises InvalidRequest with the field.

    `nested` maps each struct to the structs in its fields. If `ignored` is None, an unknown field
    is refused. Otherwise its path is added to `ignored`.
    """
    outlined = outline(body)
    try:
        request = _parsed(decoder, nested, body, ignored)
        _check_duplicates(outlined, body)
    except msgspec.ValidationError as exc:
        refusal = _explain(str(exc), body)
    except (msgspec.DecodeError, ValueError):
        refusal = InvalidRequest("the body is not valid JSON", reason="INVALID_JSON")
    except RecursionError:
        refusal = InvalidRequest("the body is nested too deeply", reason="INVALID_JSON")
    else:
        if b"\\u0000" in body:
            _check_no_nul(request)
        return request
    raise refusal  # not chained to the parser's error, which may hold the whole body


def objects_of(texts: Mapping[str, str]) -> dict[str, Object]:
    """Parse fields that hold JSON objects as text. Raises InvalidRequest with the field.

    The bounds of a body apply to all texts together.
    """
    bodies = {field: text.encode() for field, text in texts.items()}
    try:
        outline(b",".join(bodies.values()))
    except InvalidRequest as exc:
        largest = max(bodies, key=lambda field: len(bodies[field]))
        message = exc.message.replace("the body", largest)
        raise InvalidRequest(message, reason=exc.reason, field=largest) from None
    return {field: _object_of(body, field) for field, body in bodies.items()}


def _object_of(body: bytes, field: str) -> Object:
    try:
        found = _object.decode(body)
        _find_duplicates(body.decode())
    except InvalidRequest as exc:
        refusal = InvalidRequest(exc.message, reason=exc.reason, field=f"{field}.{exc.field}")
    except (msgspec.DecodeError, ValueError):
        message = f"{field} is not a JSON object"
        refusal = InvalidRequest(message, reason="INVALID_JSON", field=field)
    except RecursionError:
        message = f"{field} is nested too deeply"
        refusal = InvalidRequest(message, reason="INVALID_JSON", field=field)
    else:
        if b"\\u0000" in body:
            _check_no_nul({field: found})
        return found
    raise refusal  # without the parser's error


def _parsed(
    decoder: msgspec.json.Decoder[T], nested: Nested, body: bytes, ignored: list[str] | None
) -> T:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as exc:
        if ignored is None or not str(exc).startswith(_UNKNOWN):
            raise
    return msgspec.convert(without_unknown(body, decoder.type, nested, ignored), decoder.type)


def _refuse_duplicates(pairs: list[tuple[str, object]]) -> None:
    """Refuse duplicates, because a filter in front of the gateway could read a different value."""
    if len(dict(pairs)) == len(pairs):
        return
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            field = shortened(key)
            raise InvalidRequest(f"{field} is given twice", reason="DUPLICATE_FIELD", field=field)
        seen.add(key)


_find_duplicates: Final = json.JSONDecoder(object_pairs_hook=_refuse_duplicates).decode


def _check_duplicates(outlined: bytes, body: bytes) -> None:
    """Refuse duplicate keys. msgspec would silently take the last value.

    The standard library's parser has a hook that sees all keys. The check takes 2 us for a usual
    body.
    """
    try:
        _find_duplicates(outlined.decode())
    except InvalidRequest:
        if len(body) > SMALL_BYTES:
            raise
        _find_duplicates(body.decode())  # names like long lists of ids are emptied in the outline


def _explain(text: str, body: bytes) -> InvalidRequest:
    """Turn msgspec's message into an error with the path of the field.

    msgspec's message may contain a piece of the body, of any length.
    """
    if len(text) > _MAX_EXPLAINED:
        text = f"{text[:_MAX_EXPLAINED]}\u2026{text[-_MAX_EXPLAINED:]}"
    what, _, where = text.rpartition(" - at `$")
    if not what:
        what, where = text, ""
    where = where.removesuffix("`").removeprefix(".")
    if _ANY_KEY in where:
        where = _with_key(where, what, body)
    for kind, reason in _NAMES_A_FIELD.items():
        if what.startswith(kind):
            name = shortened(what.removeprefix(kind).removesuffix("`"))
            field = f"{where}.{name}" if where else name
            return InvalidRequest(
                f"{reason.lower().replace('_', ' ')}: {field}", reason=reason, field=field
            )
    what = what[:1].lower() + what[1:]
    return InvalidRequest(f"{where}: {what}" if where else what, field=where or None)


def _with_key(where: str, what: str, body: bytes) -> str:
    """Replace the `[...]` in `where`, which msgspec writes instead of the key of a mapping.

    msgspec reports the kind of a wrong value, but not its key. So the first key whose value has
    this kind is taken. A key that is not UTF-8 may raise an error here: msgspec stopped at the
    wrong value, before this key.
    """
    field, _, below = where.partition(_ANY_KEY)
    got = _GOT.search(what)
    if got is None or below:
        return field
    with contextlib.suppress(msgspec.MsgspecError, KeyError, UnicodeDecodeError):
        mapping = _fields.decode(_fields.decode(body)[field])
        for key, value in mapping.items():
            if _kind_of(bytes(value)) == got[1]:
                return f"{field}.{shortened(key)}"
    return field


def _kind_of(value: bytes) -> str:
    """The kind of a JSON value, in msgspec's words."""
    if (kind := _KINDS.get(value[:1])) is not None:
        return kind
    return "float" if any(mark in value for mark in b".eE") else "int"


def _check_no_nul(request: object) -> None:
    """Raises InvalidRequest with the first field that has a NUL, which would end a string in C."""
    left: list[tuple[str, object]] = [("", msgspec.to_builtins(request))]
    while left:
        where, value = left.pop()
        if isinstance(value, str) and "\0" in value:
            raise nul_refused(where)
        if isinstance(value, dict):
            for name, each in reversed(value.items()):
                if "\0" in name:
                    raise nul_refused(where)
                left.append((f"{where}.{name}" if where else name, each))
        elif isinstance(value, list):
            left += [
                (f"{where}[{at}]", each)
                for at, each in enumerate(value)
                if isinstance(each, str | dict | list)
            ][::-1]
