"""Drops the fields of a request that no API that we know has, and reports their names.

Clients send fields that are meant for other servers. Known fields that would change the answer are
refused. Unknown fields are ignored, and named in the response header `x-pdmesh-ignored`.
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
    """The body's objects without unknown fields. Adds the paths of the first of these to `ignored`.

    Raises msgspec.DecodeError.
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
