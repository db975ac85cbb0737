"""Parses the texts of the desired state in a thread beside the event loop.

The longest text takes a second, and this master's lease must be renewed meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

import structlog

from pdmesh.core.groups.desired import Desired
from pdmesh.desired_file import read
from pdmesh.errors import InvalidRequest, Overloaded
from pdmesh.v1.admin_service_pb2 import DesiredVersion

log = structlog.get_logger(__name__)

MAX_WAITING: Final = 8  # texts that callers have sent

T = TypeVar("T")


class DesiredReader:
    """The desired state of the current version, read once.

    Until a version could be read there is no desired state, which differs from an empty one.
    `problem`: why the last requested version could not be read.
    """

    def __init__(self) -> None:
        self._text: str | None = None
        self._desired: Desired | None = None
        self.problem = ""

    async def read(self, version: DesiredVersion) -> None:
        """Read a stored version, which was valid when it was stored.

        If this release refuses it, the last readable version stays.
        """
        if version.text == self._text:
            return
        desired, problem = self._desired, ""
        try:
            desired = await asyncio.to_thread(read, version.text)
        except InvalidRequest as exc:
            problem = f"version {version.version} cannot be read: {exc.message}"
            log.error("groups.unreadable", version=version.version, error=exc.message)
        self._text, self._desired, self.problem = version.text, desired, problem

    def has_read(self, version: DesiredVersion) -> bool:
        return version.text == self._text

    def known(self, version: DesiredVersion) -> Desired | None:
        """None until the version has been read; if it was refused, the last readable one."""
        return self._desired if self.has_read(version) else None


class TextWorker:
    """Works on callers' texts off the loop, one at a time; raises Overloaded if too many wait."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="desired-text")
        self._num = 0

    async def run(self, work: Callable[[], T]) -> T:
        if self._num >= MAX_WAITING:
            raise Overloaded(f"{MAX_WAITING} texts of the desired state are already being read")
        self._num += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._num -= 1
