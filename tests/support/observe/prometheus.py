"""Prometheus' own programs, where a machine has them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

_UNPACKED = Path(__file__).parents[3] / ".cache/prometheus/usr/bin"


def program(name: str) -> Path:
    """prometheus or promtool. The test is skipped if it is not there; in CI it fails."""
    for found in (shutil.which(name), shutil.which(name, path=_UNPACKED)):
        if found is not None:
            return Path(found)
    reason = f"{name} is not installed: apt install prometheus, or run .ci/prometheus"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)
