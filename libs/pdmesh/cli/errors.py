"""The errors of commands. Each becomes one line on stderr, and an exit code."""

from __future__ import annotations

from pathlib import Path

from pdmesh.cli.hints import hint


class CommandFailed(Exception):
    """A command failed. The message is for the user: it names the problem and how to fix it."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


def no_mesh(state_dir: Path) -> CommandFailed:
    return CommandFailed(f"no mesh is running here; start one with: {hint(state_dir, 'up')}")
