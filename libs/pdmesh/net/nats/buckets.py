"""The name of every bucket, in one place, and where a process finds JetStream.

With roles at NATS (ADR 0044), every process has an account of its own there. JetStream belongs to
another account, from which a process imports what its role may use, under a prefix of its own.
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
# Entries of these buckets end with their writer's lease; those of all other buckets stay.
LEASED: Final = frozenset({INSTANCES, LEADER})
# The leased buckets in which each process writes an entry of its own.
SHARED: Final = frozenset({INSTANCES})

MAKER: Final = "master-scheduler"  # the role that makes buckets, where roles are told apart
IMPORTED_API: Final = "$PDMESH.API"  # JetStream's, as other accounts import it
INBOX: Final = "_INBOX"


def inbox_of(role: str, instance_id: str) -> str:
    """The beginning of the subjects on which a process gets its answers."""
    return f"{INBOX}.{role}.{instance_id}"
