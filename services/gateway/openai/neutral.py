"""Refuses fields that are not supported, unless their value asks for nothing."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from pdmesh.errors import InvalidRequest


def check_neutral(request: msgspec.Struct, neutral: Mapping[str, tuple[object, ...]]) -> None:
    """`neutral`: the values of each unsupported field that ask for nothing; null always does.

    Raises InvalidRequest.
    """
    for field, values in neutral.items():
        value = getattr(request, field)
        if value is not None and not any(_is_same(value, each) for each in values):
            message = f"{field} is not supported"
            raise InvalidRequest(message, reason="UNSUPPORTED_FIELD", field=field)


def _is_same(value: object, other: object) -> bool:
    """Whether two values are equal in JSON, where false is not 0."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)
