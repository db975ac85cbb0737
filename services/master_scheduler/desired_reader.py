"""The desired state of the current version, read once. Until one could be read there is none, which is not an empty one."""

from __future__ import annotations

import structlog

from pdmesh.core.desired import Desired
from pdmesh.desired_file import read
from pdmesh.errors import InvalidRequest
from pdmesh.v1.admin_service_pb2 import DesiredVersion

log = structlog.get_logger(__name__)


class DesiredReader:
    """`problem`: why the version asked for last could not be read."""

    def __init__(self) -> None:
        self._text: str | None = None
        self._desired: Desired | None = None
        self.problem = ""

    def read(self, version: DesiredVersion) -> Desired | None:
        """What was stored was valid once; if this release refuses it, the last one that it could read stands, if any."""
        if version.text != self._text:
            self._text, self.problem = version.text, ""
            try:
                self._desired = read(version.text)
            except InvalidRequest as exc:
                self.problem = f"version {version.version} cannot be read: {exc.message}"
                log.error("groups.unreadable", version=version.version, error=exc.message)
        return self._desired
