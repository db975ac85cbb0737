"""Captures the log lines of a module, whatever level and processors an earlier test has set."""

from __future__ import annotations

from types import ModuleType

import pytest
import structlog
from structlog.testing import LogCapture
from structlog.typing import EventDict


def capture_logs_of(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[EventDict]:
    """The lines of `module.log` from now on. The returned list grows with each line.

    structlog's own `capture_logs` misses a logger that was used before, because this logger stays
    bound to the processors and the level of its first line.
    """
    lines = LogCapture()
    logger = structlog.wrap_logger(None, processors=[lines], wrapper_class=structlog.BoundLogger)
    monkeypatch.setattr(module, "log", logger)
    return lines.entries
