"""Bounds the number of fields in a protobuf message before it is parsed (F30).

The parser makes an object for every submessage. So 8 MiB of empty submessages cost a quarter of a
gigabyte and block the event loop for a tenth of a second. The check here only reads the tags and
stops at the bound. It ignores bytes that are not a message, because the parser refuses them.
"""

from __future__ import annotations

from typing import Final

from google.protobuf.descriptor import Descriptor

from pdmesh.errors import InvalidRequest

_SMALL_BYTES: Final = 65_536  # parsing this many bytes takes at most a few milliseconds


class _TooMany(Exception):
    """`args` is the path of the field that exceeds the bound, the outermost name first."""


def check_num_fields(data: bytes, message: Descriptor, most: int) -> None:
    """Raises InvalidRequest if a message has more than `most` fields.

    The error names the field that exceeds the bound. A field of packed numbers counts once. Small
    messages are not checked.
    """
    if len(data) <= _SMALL_BYTES:
        return
    try:
        _walk(data, 0, len(data), message, most)
    except _TooMany as exc:
        field = ".".join(exc.args)
        text = f"{field} makes more than {most} fields"
        raise InvalidRequest(text, field=field) from exc
    except IndexError:
        return  # the bytes are not a message


def _walk(data: bytes, at: int, end: int, message: Descriptor, left: int) -> int:
    """Count the fields from `at` to `end`. Returns how many more fields are allowed."""
    while at < end:
        tag, at = _varint(data, at)
        field = message.fields_by_number.get(tag >> 3)
        left -= 1
        if left < 0:
            raise _TooMany(field.name if field is not None else f"unknown field {tag >> 3}")
        match tag & 7:
            case 0:
                _, at = _varint(data, at)
            case 1:
                at += 8
            case 5:
                at += 4
            case 2:
                size, at = _varint(data, at)
                if field is not None and field.message_type is not None:
                    left = _walk_inner(
                        data, at, min(end, at + size), field.name, field.message_type, left
                    )
                at += size
    return left


def _walk_inner(data: bytes, at: int, end: int, name: str, message: Descriptor, left: int) -> int:
    try:
        return _walk(data, at, end, message, left)
    except _TooMany as exc:
        raise _TooMany(name, *exc.args) from exc


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Decode the number at `at`.

    Returns the number and the position after it, or raises IndexError.
    """
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise IndexError
