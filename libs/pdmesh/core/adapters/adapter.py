"""What names a LoRA adapter: operators and clients by its name, the mesh by its content.

A name may be given other content at any time. So all that depends on the content (names of KV
blocks, an engine's slot, the tokens of a request to its end) goes by the digest.
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
    """`digest`: SHA-256 of its files, hex. `path`: the folder of them, as instances see it."""

    name: str
    digest: str
    path: str

    def check(self) -> None:
        """Raises InvalidRequest with the field's name."""
        check_name(self.name)
        if not _DIGEST.fullmatch(self.digest):
            raise InvalidRequest("a digest is 64 hex digits", field="adapter.digest")
        check_path(self.path, "adapter.path")


def check_name(name: str, field: str = "name") -> None:
    """Raises InvalidRequest."""
    if not NAME.fullmatch(name):
        text = "an adapter's name is letters, digits, - and _, at most 63"
        raise InvalidRequest(f"{text}; not {shortened(name)!r}", field=field)


def check_path(path: str, field: str = "path") -> None:
    """Raises InvalidRequest."""
    if not path.startswith("/") or "\0" in path or len(path) > _MAX_PATH:
        raise InvalidRequest(f"an absolute path of at most {_MAX_PATH} characters", field=field)
