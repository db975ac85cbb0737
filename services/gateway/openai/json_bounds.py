"""Decides, before a JSON body is parsed, whether parsing it would take too long (F31).

A parser makes an object for each value. This takes at least 0.1 us and blocks the event loop: 8 MiB
of `{},` take 1.5 s. Token ids take almost no time, and a long string no more than a short one. So
all values except token ids are counted, in the whole body, including duplicate fields. The bytes
outside strings and token ids have a bound too, because parsers read white space and digits one by
one.

The code uses Python's string methods on large pieces, and never loops over bytes.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Final

import msgspec

from pdmesh.errors import InvalidRequest, shortened

MAX_VALUES: Final = 32_768
MAX_IDS: Final = 1 << 20  # token ids in all lists together
MAX_OUTSIDE_BYTES: Final = 1 << 20  # bytes of a large body outside strings and lists of token ids
MAX_NAME_BYTES: Final = 256  # of a field's name in a large body
SMALL_BYTES: Final = 65_536  # a body of this size costs at most a few milliseconds
_LONG: Final = 256
_ID_LIST: Final = re.compile(rb"\[[0-9, \n\r\t]*+\]")
_LONG_ID_LIST: Final = re.compile(rb"\[[0-9, \n\r\t]{256,}+\]")
# These two replace escaped backslashes and quotes, so that each remaining quote begins or ends a
# string. Names that differ in escaped characters stay different.
_BACKSLASH: Final = "\x80".encode()
_QUOTE: Final = "\x81".encode()
_fields: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


def outline(body: bytes) -> bytes:
    """The body without the long parts that cannot hold names of fields.

    Long lists of token ids are emptied. In a large body, all lists of token ids and all long
    strings are emptied. Raises InvalidRequest. If one field alone has too many values or token ids,
    the error names this field.
    """
    if len(body) <= SMALL_BYTES:
        return _LONG_ID_LIST.sub(b"[]", body)
    plain = _without_escapes(body)
    if plain.count(b'"') > 2 * MAX_VALUES:
        raise _too_many_values(body)
    pieces = plain.split(b'"')
    if len(pieces) % 2 == 0:
        raise InvalidRequest("a string in the body is not closed", reason="INVALID_JSON")
    pieces[::2] = _without_ids(b'"'.join(pieces[::2]), len(pieces) // 2, body).split(b'"')
    for at in range(1, len(pieces), 2):
        if len(pieces[at]) > _LONG:
            _check_is_no_name(pieces[at], pieces[at + 1])
            pieces[at] = b""
    return b'"'.join(pieces)


def _without_ids(outside: bytes, num_strings: int, body: bytes) -> bytes:
    """The bytes between strings, with lists of token ids emptied.

    Raises InvalidRequest if there are too many token ids.
    """
    if len(outside) > MAX_OUTSIDE_BYTES and b"[" not in outside:
        raise _too_much_outside()
    if _num_lists(outside) > MAX_VALUES:
        raise _too_many_values(body)
    bare = _ID_LIST.sub(b"[]", outside)
    num_commas = bare.count(b",")
    if num_strings + _num_lists(bare) + num_commas > MAX_VALUES:
        raise _too_many_values(body)
    if len(outside) - len(bare) > MAX_IDS and outside.count(b",") - num_commas >= MAX_IDS:
        raise _refusal(f"holds more than {MAX_IDS} token ids", body, _num_ids, MAX_IDS)
    if len(bare) > MAX_OUTSIDE_BYTES:
        raise _too_much_outside()
    return bare


def _num_lists(text: bytes) -> int:
    return text.count(b"[") + text.count(b"{")


def _check_is_no_name(text: bytes, after: bytes) -> None:
    if after.lstrip(b" \n\r\t")[:1] == b":":
        field = shortened(text[:256].decode(errors="replace"))
        message = f"the name of a field has more than {MAX_NAME_BYTES} bytes: {field}"
        raise InvalidRequest(message, reason="UNKNOWN_FIELD", field=field)


def _too_much_outside() -> InvalidRequest:
    return InvalidRequest(
        f"the body holds more than {MAX_OUTSIDE_BYTES} bytes besides text and token ids"
    )


def _too_many_values(body: bytes) -> InvalidRequest:
    return _refusal(f"holds more than {MAX_VALUES} values", body, _num_values, MAX_VALUES)


def _refusal(what: str, body: bytes, count: Callable[[bytes], int], most: int) -> InvalidRequest:
    """The error. If one field alone holds more than `most`, the error names this field."""
    field = None
    with contextlib.suppress(msgspec.MsgspecError, ValueError, RecursionError):
        for name, raw in _fields.decode(body).items():
            if len(memoryview(raw)) > most and count(bytes(raw)) > most:
                field = shortened(name) or None
                break
    return InvalidRequest(f"{field or 'the body'} {what}", field=field)


def _num_values(value: bytes) -> int:
    """The number of values: strings, lists, objects, and one for each comma, without token ids."""
    plain = _without_escapes(value)
    if (num_quotes := plain.count(b'"')) > 2 * MAX_VALUES:
        return num_quotes // 2
    outside = _outside(plain)
    if (num_lists := _num_lists(outside)) > MAX_VALUES:
        return num_lists
    bare = _ID_LIST.sub(b"[]", outside)
    return num_quotes // 2 + _num_lists(bare) + bare.count(b",")


def _num_ids(value: bytes) -> int:
    outside = _outside(_without_escapes(value))
    bare = _ID_LIST.sub(b"[]", outside)
    return 1 + outside.count(b",") - bare.count(b",")


def _outside(plain: bytes) -> bytes:
    return b'"'.join(plain.split(b'"')[::2])


def _without_escapes(text: bytes) -> bytes:
    if b"\\" not in text:
        return text
    return text.replace(b"\\\\", _BACKSLASH).replace(b'\\"', _QUOTE)
