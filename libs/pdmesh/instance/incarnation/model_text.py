"""Finds the tokenizer files of the model that this instance has loaded, for gateways.

Files that gateways cannot read are converted into a temporary folder.
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
    """The tokenizer files. If `files` is None, gateways use the files in a folder of their own."""

    files: TextFiles | None = None
    made: tempfile.TemporaryDirectory[str] | None = None  # holds the files, if they were converted

    def remove(self) -> None:
        if self.made is not None:
            self.made.cleanup()


async def text_of(folder: Path | None) -> LoadedText:
    """Find the files in the model's folder, and convert them if necessary.

    If that fails, the log shows the reason, and the model is served without the files.
    """
    if folder is None:  # the sim engine needs no files
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
