"""How the connector tells the host why it cannot move a model's KV.

vLLM's processes end with the error, and vLLM says to the host only that they ended. So the cause
stands in a file beside the control socket.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_FILE: Final = "refusal"


class CannotMoveKv(ValueError):
    """The caches of this model are of a kind that the mesh does not move; says which, in a line."""


@contextlib.contextmanager
def told_to_host(control_path: str) -> Iterator[None]:
    """Leave the cause for the host if the block raises CannotMoveKv."""
    try:
        yield
    except CannotMoveKv as error:
        _file(Path(control_path)).write_text(str(error))
        raise


def read_refusal(control_path: Path) -> str | None:
    """What a process of this engine said before it ended; None if it was something else."""
    try:
        return _file(control_path).read_text()
    except FileNotFoundError:
        return None


def _file(control_path: Path) -> Path:
    return control_path.with_name(_FILE)
