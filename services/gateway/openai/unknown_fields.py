"""Drops the unknown fields of a request, and reports their names.

A field is unknown if no API that pdmesh knows has it in this kind of request. Clients send such
fields for other servers. The response names them in the header `x-pdmesh-ignored`. Known fields
that would change the answer but are not supported are refused elsewhere (`unsupported_fields`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from pdmesh.errors import shortened

HEADER: Final = b"x-pdmesh-ignored"
_MAX_NAMED: Final = 16
_NOT_IN_A_HEADER: Final = re.compile(r"[^\x21-\x2b\x2d-\x7e]")

Struct = type[msgspec.Struct]
# The structs within a struct, by field. Each field holds one struct or a list of them.
Nested = Mapping[Struct, Mapping[str, Struct]]


def without_unknown(body: bytes, kind: Struct, nested: Nested, ignored: list[str]) -> Any:
    """The decoded body without unknown fields. Raises msgspec.DecodeError.

    The paths of the first 16 unknown fields are added to `ignored`.
    """
    value = msgspec.json.decode(body)
    _prune(value, kind, nested, "", ignored)
    return value


def header_of(names: Sequence[str]) -> tuple[bytes, bytes]:
    shown = (_NOT_IN_A_HEADER.sub("?", shortened(name)) for name in names)
    return HEADER, ", ".join(shown).encode()


def _prune(value: Any, kind: Struct, nested: Nested, where: str, names: list[str]) -> None:
    if not isinstance(value, dict):
        return
    within = nested.get(kind, {})
    known = frozenset(kind.__struct_encode_fields__)
    for name in [name for name in value if name not in known]:
        del value[name]
        if len(names) < _MAX_NAMED:
            names.append(where + name)
    for name, inner in within.items():
        below = value.get(name)
        if isinstance(below, list):
            for index, each in enumerate(below):
                _prune(each, inner, nested, f"{where}{name}[{index}].", names)
        else:
            _prune(below, inner, nested, f"{where}{name}.", names)
