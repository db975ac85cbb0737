"""How the connector tells the host why it cannot move a model's KV.

vLLM's processes crash with the error, and vLLM tells the host only that they ended. So the
connector writes the cause to a file beside the control socket.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_FILE: Final = "refusal"


class CannotMoveKv(ValueError):
    """The mesh does not move caches of the model's kind. The message names the kind in one line."""

    reason = "MODEL_UNSUPPORTED"
    page = "docs/cache-kinds.md"


class HasNoKvPath(CannotMoveKv):
    """The settings ask for a way to move KV that this machine does not have."""

    reason = "KV_NO_TRANSPORT"
    page = "docs/gpu.md"


@dataclass(frozen=True, slots=True)
class KvRefusal:
    reason: str
    message: str


@contextlib.contextmanager
def told_to_host(control_path: str) -> Iterator[None]:
    """Leave the cause for the host if the block raises CannotMoveKv."""
    try:
        yield
    except CannotMoveKv as error:
        _file(Path(control_path)).write_text(f"{error.reason} {error} ({error.page})")
        raise


def read_refusal(control_path: Path) -> KvRefusal | None:
    """The refusal that a process of this engine left; None if the cause was another one."""
    try:
        reason, _, message = _file(control_path).read_text().partition(" ")
    except FileNotFoundError:
        return None
    return KvRefusal(reason, message)


def _file(control_path: Path) -> Path:
    return control_path.with_name(_FILE)
