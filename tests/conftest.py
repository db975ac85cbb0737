"""Property tests search at random on a developer's machine; CI runs the same examples every time.

No example has a deadline: on a busy machine it would measure the neighbours.
"""

from __future__ import annotations

import os

from hypothesis import settings

import pdmesh  # noqa: F401  before a test module imports grpc: see pdmesh.grpc_environment

settings.register_profile("ci", derandomize=True, print_blob=True, deadline=None)
settings.register_profile("local", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "local")
