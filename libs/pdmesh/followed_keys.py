"""Reads a file of API keys again whenever the file changes.

If the file cannot be read, the last keys stay valid.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import structlog

from pdmesh import api_keys
from pdmesh.api_keys import KeyFile, Keyring

log = structlog.get_logger(__name__)

_RELOAD_S: Final = 1.0

# Called with the file's old and new content after a change.
OnKeysChanged = Callable[[KeyFile, KeyFile], Awaitable[None]]


class FollowedKeys:
    """`keyring` has the keys that were last read from the file."""

    def __init__(self, path: Path) -> None:
        """Raises BadKeyFile."""
        self._path = path
        self._stamp = _stamp(path)
        self._file = api_keys.load(path)
        self.keyring = Keyring(self._file)

    async def run(self, on_change: OnKeysChanged) -> None:
        """Look for changes until cancelled."""
        while True:
            await asyncio.sleep(_RELOAD_S)
            before = self._file
            if await self.reload():
                await on_change(before, self._file)

    async def reload(self) -> bool:
        """Read the file again if it has changed. Returns whether the keys were replaced."""
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        try:
            file = await asyncio.to_thread(api_keys.load, self._path)
        except api_keys.BadKeyFile as exc:
            log.error("keys.unreadable", reason=str(exc))
            return False
        self._file, self.keyring = file, Keyring(file)
        keyring = self.keyring
        log.info("keys.loaded", num_keys=len(keyring), num_tenants=len(keyring.tenants))
        return True


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        found = path.stat()
    except OSError:
        return (0, 0, 0)
    return (found.st_mtime_ns, found.st_size, found.st_ino)
