"""Encodes events in protobuf's JSON mapping, about five times faster than `json_format`.

The speed matters because a gateway writes one event per request. The encoder covers the types that
the mesh's events use: numbers, strings, bytes, enums, messages, repeated fields, Timestamp and
Struct. A test compares it with `json_format.MessageToDict`.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from functools import cache
from typing import Any, Final

import orjson
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from google.protobuf.struct_pb2 import Struct
from google.protobuf.timestamp_pb2 import Timestamp

_WIDE: Final = {  # JSON numbers are doubles, so 64 bits travel as text
    FieldDescriptor.CPPTYPE_INT64,
    FieldDescriptor.CPPTYPE_UINT64,
}
_Convert = Callable[[Any], Any]  # from a field's value to its JSON value


def to_json(message: Message) -> bytes:
    return orjson.dumps(_to_dict(message))


def _to_dict(message: Message) -> Any:
    if isinstance(message, Timestamp):
        return message.ToJsonString()
    if isinstance(message, Struct):
        return MessageToDict(message)
    converters = _converters(message.DESCRIPTOR)
    found: dict[str, Any] = {}
    for field, value in message.ListFields():
        name, convert = converters[field.number]
        found[name] = value if convert is None else convert(value)
    return found


@cache
def _converters(descriptor: Descriptor) -> dict[int, tuple[str, _Convert | None]]:
    """By field number: the field's name in JSON, and the function that converts its value.

    The function is None if the value needs no conversion.
    """
    return {field.number: (field.json_name, _converter(field)) for field in descriptor.fields}


def _converter(field: FieldDescriptor) -> _Convert | None:
    one = _converter_of_one(field)
    if not field.is_repeated:
        return one
    return list if one is None else lambda values: [one(value) for value in values]


def _converter_of_one(field: FieldDescriptor) -> _Convert | None:
    if field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
        return _to_dict
    if field.cpp_type in _WIDE:
        return str
    if field.enum_type is not None:
        names = {value.number: value.name for value in field.enum_type.values}
        return lambda number: names.get(number, number)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return lambda data: base64.b64encode(data).decode()
    return None
