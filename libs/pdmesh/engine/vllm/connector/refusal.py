"""Tells the host why the connector cannot move a model's KV.

The host is the part of an instance outside vLLM. It learns from vLLM only that vLLM's processes
ended. So before the connector lets a process crash, it writes the cause to a file beside the
control socket.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_FILE: Final = "refusal"


class CannotMoveKv(ValueError):
    """The mesh cannot move this engine's KV. The message says why, in one line."""

    reason = "MODEL_UNSUPPORTED"
    page = "docs/cache-kinds.md"


class HasNoKvPath(CannotMoveKv):
    """The settings ask for a way to move KV that this machine lacks."""

    reason = "KV_NO_TRANSPORT"
    page = "docs/gpu.md"


@dataclass(frozen=True, slots=True)
class KvRefusal:
    reason: str
    message: str


@contextlib.contextmanager
def told_to_host(control_path: str) -> Iterator[None]:
    """If the `with` block raises CannotMoveKv, write the cause to the file for the host."""
    try:
        yield
    except CannotMoveKv as error:
        _file(Path(control_path)).write_text(f"{error.reason} {error} ({error.page})")
        raise


def read_refusal(control_path: Path) -> KvRefusal | None:
    """The refusal that a process of this engine wrote.

    None if the engine ended for another reason.
    """
    try:
        reason, _, message = _file(control_path).read_text().partition(" ")
    except FileNotFoundError:
        return None
    return KvRefusal(reason, message)


def _file(control_path: Path) -> Path:
    return control_path.with_name(_FILE)
