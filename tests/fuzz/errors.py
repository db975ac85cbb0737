"""Checks the errors that an unknown client gets."""

from __future__ import annotations

from typing import Final

from pdmesh.errors import MeshError

_MOST_SAID: Final = 1000  # characters, however long the client's input was


def check(error: MeshError) -> None:
    for said in (error.message, getattr(error, "field", None) or ""):
        assert len(said) <= _MOST_SAID, "an error echoes the client's own text"
        said.encode()  # raises if the text cannot be encoded
