"""How much a JSON body may ask of its parsers, found out before they see it (F31).

A parser makes an object of each value, at a tenth of a microsecond and more, and the event loop stands still meanwhile: 8 MiB of `{},`
cost it 1.5 s. Text, however long, costs next to nothing, and so do token ids, so it is all other values that are counted: over the whole
body, a field given twice included.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from pdmesh.errors import InvalidRequest

MAX_VALUES: Final = 32_768
MAX_IDS: Final = 1 << 20  # token ids in one list
_SMALL_BYTES: Final = 65_536  # cannot hold more than what costs a few milliseconds
_LONG: Final = 256
_LIST: Final = ord("[")
# Where no quote is escaped a string ends at the next one. A list of nothing but digits is one value here.
_VALUE: Final = re.compile(rb'"[^"]*+"|\[[0-9, \n\r\t]*+\]|[,\[{]')
_ID_LIST: Final = re.compile(rb"\[[0-9, \n\r\t]{256,}+\]")
_fields: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


def outline(body: bytes) -> bytes:
    """What is to be looked at for the names in it: the body with long lists of token ids emptied; of a large one long strings too, and escaped quotes
    are gone. Raises InvalidRequest if there are too many values, with the field that holds most of the body."""
    if len(body) <= _SMALL_BYTES:
        return _ID_LIST.sub(b"[]", body)
    plain, shown = body, 0
    parts: list[bytes] = []
    if b"\\" in body:
        plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    for number, found in enumerate(_VALUE.finditer(plain)):
        if number >= MAX_VALUES:
            raise _refusal(f"holds more than {MAX_VALUES} values", body)
        start, end = found.span()
        if end - start <= _LONG:
            continue
        is_list = plain[start] == _LIST
        if is_list and end - start > MAX_IDS and plain.count(b",", start, end) >= MAX_IDS:
            raise _refusal(f"holds more than {MAX_IDS} token ids", body)
        parts += (plain[shown:start], b"[]" if is_list else b'""')
        shown = end
    return b"".join((*parts, plain[shown:]))


def _refusal(what: str, body: bytes) -> InvalidRequest:
    field = _largest_field(body)
    return InvalidRequest(f"{field or 'the body'} {what}", field=field)


def _largest_field(body: bytes) -> str | None:
    try:
        fields = _fields.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    return max(fields, key=lambda name: len(memoryview(fields[name])), default="")[:64] or None
