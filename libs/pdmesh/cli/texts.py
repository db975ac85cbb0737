"""Reads the input text of a command from a file or from stdin."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from pdmesh.cli.errors import CommandFailed

MAX_BYTES: Final = 8 << 20  # gateways and masters accept no more


def text_of(file: Path) -> str:
    """The text of `file`, or of stdin for `-`. Raises CommandFailed."""
    try:
        text = _stdin(file) if str(file) == "-" else _content(file)
    except OSError as exc:
        raise CommandFailed(f"{file}: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise CommandFailed(f"{file} is not text") from exc
    if len(text.encode()) > MAX_BYTES:
        raise CommandFailed(f"{file}: longer than {MAX_BYTES} bytes")
    return text


def _content(file: Path) -> str:
    with file.open() as source:
        return source.read(MAX_BYTES + 1)


def _stdin(file: Path) -> str:
    stdin = getattr(sys, "stdin", None)
    if stdin is None:
        raise CommandFailed(f"{file}: stdin is closed")
    return str(stdin.read(MAX_BYTES + 1))
