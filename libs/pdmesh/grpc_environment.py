"""What gRPC's library is told by its environment, which it reads once: when it is first imported.

So `pdmesh/__init__.py` prepares it, and `services/__init__.py` imports `pdmesh`, before any module
of theirs imports grpc.
"""

from __future__ import annotations

import os
from typing import Final

_ENVIRONMENT: Final = {
    # The older poller hands a message to Python over one thread, the event engine over three: half
    # the round trip, a third less CPU (docs/adr/0007).
    "GRPC_EXPERIMENTS": "-event_engine_client,-event_engine_listener",
    # What it has to say comes back as an error, too; its lines are no JSON, in a log that is.
    "GRPC_VERBOSITY": "NONE",
}


def prepare() -> None:
    """Whoever set one of the variables knows better."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
