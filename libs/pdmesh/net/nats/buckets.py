"""The names of all JetStream buckets, and the subjects by which a process uses JetStream.

If NATS has permissions by role (ADR 0044), every process has its own account at NATS. JetStream
belongs to another account. A process's account imports the parts of JetStream's API that the
process's role may use, under the prefix IMPORTED_API.
"""

from __future__ import annotations

from typing import Final

ASSIGNMENTS: Final = "pdmesh-assignments"  # by instance
INSTANCES: Final = "pdmesh-instances"  # records, by process
HEALTH: Final = "pdmesh-health"  # by process
FAULTS: Final = "pdmesh-faults"  # by instance
PINS: Final = "pdmesh-pins"
ADAPTERS: Final = "pdmesh-adapters"
OUT_OF_SERVICE: Final = "pdmesh-out-of-service"  # by instance
DESIRED: Final = "pdmesh-desired"
LEADER: Final = "pdmesh-leader"
USAGE: Final = "pdmesh-usage"
TENANTS: Final = "pdmesh-tenants"

ALL_BUCKETS: Final = (
    ASSIGNMENTS, INSTANCES, HEALTH, FAULTS, PINS, ADAPTERS, OUT_OF_SERVICE, DESIRED, LEADER, USAGE,
    TENANTS,
)  # fmt: skip
# In these buckets, an entry expires with the lease of its writer. In other buckets, entries stay.
LEASED: Final = frozenset({INSTANCES, LEADER})
# The leased buckets in which each process writes its own entry.
SHARED: Final = frozenset({INSTANCES})

MAKER: Final = "master-scheduler"  # the role that makes buckets, if NATS has permissions by role
IMPORTED_API: Final = "$PDMESH.API"  # prefix of JetStream's API in the accounts that import it
INBOX: Final = "_INBOX"


def inbox_of(role: str, instance_id: str) -> str:
    """The prefix of the subjects on which a process receives answers to its requests."""
    return f"{INBOX}.{role}.{instance_id}"
