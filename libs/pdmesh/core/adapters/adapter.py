"""Identifies a LoRA adapter by name for operators and clients, and by content inside the mesh.

An operator may give a name new content at any time. So the digest of the adapter's files identifies
the adapter wherever the content matters: in the names of KV blocks, in an engine's slots, and for a
running request.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from pdmesh.errors import InvalidRequest, shortened

NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_MAX_PATH: Final = 4096


@dataclass(frozen=True, slots=True)
class Adapter:
    """`digest` is the SHA-256 of the adapter's files, in hex. `path` is their folder, as instances
    see it.
    """

    name: str
    digest: str
    path: str

    def check(self) -> None:
        """Raises InvalidRequest, which names the field."""
        check_name(self.name)
        if not _DIGEST.fullmatch(self.digest):
            raise InvalidRequest("a digest must have 64 hex digits", field="adapter.digest")
        check_path(self.path, "adapter.path")


def check_name(name: str, field: str = "name") -> None:
    """Raises InvalidRequest."""
    if not NAME.fullmatch(name):
        text = "an adapter's name must have 1 to 63 letters, digits, - and _"
        raise InvalidRequest(f"{text}; not {shortened(name)!r}", field=field)


def check_path(path: str, field: str = "path") -> None:
    """Raises InvalidRequest."""
    if not path.startswith("/") or "\0" in path or len(path) > _MAX_PATH:
        raise InvalidRequest(
            f"the path must be absolute, of at most {_MAX_PATH} characters", field=field
        )
