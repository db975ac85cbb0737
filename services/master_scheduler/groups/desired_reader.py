"""Parses texts of the desired state in a thread.

The longest text takes a second. On the event loop, this would keep the master from renewing its
lease in time.
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

MAX_WAITING: Final = 8  # how many texts of callers may wait or be parsed

T = TypeVar("T")


class DesiredReader:
    """Parses the current version of the desired state, and keeps the result.

    Until a version has been parsed successfully, the desired state is None. This differs from an
    empty desired state. `problem` says why the last version could not be read.
    """

    def __init__(self) -> None:
        self._text: str | None = None
        self._desired: Desired | None = None
        self.problem = ""

    async def read(self, version: DesiredVersion) -> None:
        """Read a stored version.

        If this release cannot read the version, for example because a newer release stored it, the
        last readable version stays in force.
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
        """The desired state of this version, after `read` has tried it.

        If the version cannot be read, this is the last readable desired state. None before `read`.
        """
        return self._desired if self.has_read(version) else None


class TextWorker:
    """Runs work on callers' texts in a thread, one text at a time.

    `run` raises Overloaded if too many texts wait.
    """

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
