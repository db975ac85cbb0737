"""Hints with a command to type next. The command works for the user's state directory."""

from __future__ import annotations

import os
import shlex
from pathlib import Path


def default_state_dir() -> Path:
    return Path(os.environ.get("PDMESH_STATE_DIR", ".pdmesh"))


def hint(state_dir: Path, command: str, *, program: str = "pdmesh") -> str:
    """The line to type for `command`. It has --state-dir if the directory is not the default."""
    if state_dir == default_state_dir():
        return f"{program} {command}"
    return f"{program} {command} --state-dir {shlex.quote(str(state_dir))}"
