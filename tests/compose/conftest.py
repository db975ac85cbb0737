"""Settings for the tests of containers, which `make compose-test` runs.

The tests need a container engine, and build the image of the mesh.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.compose.cluster import engine


@pytest.fixture(scope="session", autouse=True)
def container_engine() -> Iterator[None]:
    script = os.environ.get("COMPOSE_ENGINE")  # this script starts an engine if none runs
    with engine(Path(script).absolute() if script else None) as is_there:
        if not is_there:
            refuse = pytest.fail if os.environ.get("CI") else pytest.skip
            refuse(
                "no docker engine with compose answers, and COMPOSE_ENGINE names no script that "
                "starts one"
            )
        yield
