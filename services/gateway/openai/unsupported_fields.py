"""Refuses fields that are not supported, unless their value has no effect."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter

import msgspec

from pdmesh.errors import InvalidRequest


class NeutralValues(dict[str, tuple[object, ...]]):
    """The unsupported fields of a struct, each with the values that have no effect.

    Null never has an effect. There must be at least two fields, because `attrgetter` returns no
    tuple for one.
    """

    __slots__ = ("_read",)

    def __init__(self, values: Mapping[str, tuple[object, ...]]) -> None:
        super().__init__(values)
        assert len(self) > 1, "a single attribute would be read without a tuple around it"
        self._read = attrgetter(*self)  # reads all fields at once, as most requests set none

    def check(self, request: msgspec.Struct) -> None:
        """Raises InvalidRequest."""
        given = self._read(request)
        if given.count(None) == len(given):
            return
        for (field, neutral), value in zip(self.items(), given, strict=True):
            if value is not None and not any(_is_same(value, each) for each in neutral):
                message = f"{field} is not supported"
                raise InvalidRequest(message, reason="UNSUPPORTED_FIELD", field=field)


def _is_same(value: object, other: object) -> bool:
    """Whether two values are equal in JSON, where false is not 0."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)
