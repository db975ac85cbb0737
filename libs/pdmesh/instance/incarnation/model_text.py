"""What gateways need from the model that this instance has loaded: files to turn text into
tokens.
"""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import dataclass
from pathlib import Path

import structlog

from pdmesh.engine.vllm.model.text_conversion import converted
from pdmesh.text_files import BadTextFiles, TextFiles, read_text_files

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedText:
    """`files` None: there are none that gateways can read; they use those in their own folder."""

    files: TextFiles | None = None
    made: tempfile.TemporaryDirectory[str] | None = None  # holds the files, if they were converted

    def remove(self) -> None:
        if self.made is not None:
            self.made.cleanup()


async def text_of(folder: Path | None) -> LoadedText:
    """If there are no files that gateways can read, the model is still served; the log says why."""
    if folder is None:  # the sim engine needs none
        return LoadedText()
    try:
        files = await asyncio.to_thread(_read, folder)
        if files is None or files.is_readable:
            return LoadedText(files)
        return await _converted(folder)
    except BadTextFiles as exc:
        log.warning("model.no_text", reason=str(exc))
        return LoadedText()


def _read(folder: Path) -> TextFiles | None:
    return read_text_files(folder) if folder.is_dir() else None


async def _converted(folder: Path) -> LoadedText:
    made = tempfile.TemporaryDirectory(prefix="pdmesh-text-")
    try:
        return LoadedText(await converted(folder, Path(made.name)), made)
    except BaseException:
        made.cleanup()
        raise
