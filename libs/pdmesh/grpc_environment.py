"""The environment variables of gRPC's library, which reads them once: when it is first imported.

So `pdmesh/__init__.py` sets them before any module imports grpc.
"""

from __future__ import annotations

import os
from typing import Final

_ENVIRONMENT: Final = {
    # The older poller hands a message to Python over one thread, the event engine over three: half
    # the round trip, a third less CPU (docs/adr/0007).
    "GRPC_EXPERIMENTS": "-event_engine_client,-event_engine_listener",
    # Its errors also reach us as exceptions; its own lines are no JSON, in a log that is.
    "GRPC_VERBOSITY": "NONE",
}


def prepare() -> None:
    """A variable that is set already keeps its value."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
