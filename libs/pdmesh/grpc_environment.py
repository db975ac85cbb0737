"""The environment variables of gRPC's library, which reads them only when it is first imported.

So `pdmesh/__init__.py` sets them before any module imports grpc.
"""

from __future__ import annotations

import os
from typing import Final

_ENVIRONMENT: Final = {
    # The older poller hands a message to Python over one thread, the event engine over three. It
    # halves the round trip and saves a third of the CPU (docs/adr/0007).
    "GRPC_EXPERIMENTS": "-event_engine_client,-event_engine_listener",
    # gRPC's errors reach us as exceptions. Its own lines would not be JSON, as our log is.
    "GRPC_VERBOSITY": "NONE",
}


def prepare() -> None:
    """Set the variables, except those that already have a value."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
