"""Settings for all tests.

All meshes and servers of a test run require one mesh token, and every call from a test has this
token. Property tests search at random on a developer's machine, but CI runs the same examples every
time. Examples have no deadline and may be slow to draw, because a busy machine would make such
limits fail.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import structlog
from hypothesis import HealthCheck, settings

import pdmesh  # noqa: F401  before a test module imports grpc: see pdmesh.grpc_environment
from pdmesh.net.grpc import rpc

# structlog's default prints every local variable of every frame, which costs a second of event loop
# time per traceback.
structlog.configure(
    processors=[
        structlog.processors.add_log_level,
        structlog.dev.ConsoleRenderer(
            colors=False, exception_formatter=structlog.dev.plain_traceback
        ),
    ]
)
os.environ["PDMESH_MESH_TOKEN"] = MESH_TOKEN = "of-the-tests-and-no-other-mesh"
rpc.use_mesh_token(MESH_TOKEN)

# A shell's background job ignores Ctrl-C. So every command that a test starts would also ignore it.
signal.signal(signal.SIGINT, signal.default_int_handler)

_BUSY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", _BUSY, derandomize=True, print_blob=True)
settings.register_profile("local", _BUSY)
settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture(autouse=True)
def _log_settings() -> Iterator[None]:
    """Restore structlog after each test, because a command silences the log of its process."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Write to JUnit files what each test proves. docs/coverage.md is made from these files."""
    for item in items:
        marks = [mark for kind in ("req", "fault") for mark in item.iter_markers(kind)]
        numbers = dict.fromkeys(number for mark in marks for number in mark.args)
        item.user_properties += [("proves", number) for number in numbers]
