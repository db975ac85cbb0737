"""What every error that a stranger is told must be."""

from __future__ import annotations

from typing import Final

from pdmesh.errors import MeshError

_MOST_SAID: Final = 1000  # characters, whatever the stranger's own were


def check(error: MeshError) -> None:
    for said in (error.message, getattr(error, "field", None) or ""):
        assert len(said) <= _MOST_SAID, "an error echoes a stranger's own text"
        said.encode()  # it can be sent
