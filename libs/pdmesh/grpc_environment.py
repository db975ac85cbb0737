"""Sets the environment variables that gRPC's library reads when it is first imported.

`pdmesh/__init__.py` calls `prepare` before any module imports grpc.
"""

from __future__ import annotations

import os
from typing import Final

_ENVIRONMENT: Final = {
    # Use the older poller instead of the event engine. It hands a message to Python over one thread
    # instead of three, which halves the round trip and saves a third of the CPU (docs/adr/0007).
    "GRPC_EXPERIMENTS": "-event_engine_client,-event_engine_listener",
    # gRPC's own log lines would not be JSON, as our log is. Its errors reach Python as exceptions
    # anyway.
    "GRPC_VERBOSITY": "NONE",
}


def prepare() -> None:
    """Set the variables, unless they have a value already."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
