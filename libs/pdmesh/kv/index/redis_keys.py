"""Every Redis key, in one place: pdmesh:v1:<noun>:<id>[:<field>].

The index keeps nothing of a prompt: a block's name is a keyed hash. Only responses that clients
ask to keep hold text.
"""

from __future__ import annotations

from typing import Final

from pdmesh.core.kv.tiers.load_plan import Tier

_PREFIX: Final = "pdmesh:v1"

INSTANCES: Final = f"{_PREFIX}:instances"  # set of the ids that own keys
EPOCH: Final = f"{_PREFIX}:index:epoch"  # exists until the store is wiped


def instance_blocks(instance_id: str, tier: Tier) -> str:
    """Set of the blocks (16 bytes each) that the instance holds in the tier."""
    return f"{_PREFIX}:instance:{instance_id}:{tier}-blocks"


def instance_version(instance_id: str) -> str:
    """A hash with incarnation and sequence. It is missing while the blocks are being rewritten."""
    return f"{_PREFIX}:instance:{instance_id}:version"


def kept_response(tenant: str, response_id: str) -> str:
    """A response and its conversation, as JSON. All keys of a tenant are on one shard."""
    return f"{_PREFIX}:response:{{{tenant}}}:{response_id}"


def kept_mark(tenant: str, response_id: str, mark: str) -> str:
    """`made`: a living gateway makes the response. `stop`: it is to stop."""
    return f"{kept_response(tenant, response_id)}:{mark}"


def kept_expiries(tenant: str) -> str:
    """Sorted set of the tenant's response ids by when they expire, in ms."""
    return f"{_PREFIX}:responses:{{{tenant}}}:expiries"


def kept_sizes(tenant: str) -> str:
    """Hash: bytes of each response by its id, and of all of them under the empty name."""
    return f"{_PREFIX}:responses:{{{tenant}}}:sizes"
