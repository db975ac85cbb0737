"""A key file that is read again when it changes. If it cannot be read, the last keys stay valid."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog

from pdmesh import api_keys
from pdmesh.api_keys import Keyring

log = structlog.get_logger(__name__)

_RELOAD_S: Final = 1.0


class FollowedKeys:
    """`keyring` has the keys of the file as it was read last."""

    def __init__(self, path: Path) -> None:
        """Raises BadKeyFile."""
        self._path = path
        self._stamp = _stamp(path)
        self.keyring = Keyring(api_keys.load(path))

    async def run(self, on_change: Callable[[], None] = lambda: None) -> None:
        """Runs until cancelled."""
        while True:
            await asyncio.sleep(_RELOAD_S)
            if await self.reload():
                on_change()

    async def reload(self) -> bool:
        """Whether there are new keys."""
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        try:
            file = await asyncio.to_thread(api_keys.load, self._path)
        except api_keys.BadKeyFile as exc:
            log.error("keys.unreadable", reason=str(exc))
            return False
        self.keyring = keyring = Keyring(file)
        log.info("keys.loaded", num_keys=len(keyring), num_tenants=len(keyring.tenants))
        return True


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        found = path.stat()
    except OSError:
        return (0, 0, 0)
    return (found.st_mtime_ns, found.st_size, found.st_ino)
