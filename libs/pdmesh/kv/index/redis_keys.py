"""All Redis keys of the mesh. Most have the form pdmesh:v1:<noun>:<id>[:<field>].

The keys of the block index reveal no prompt, because a block's name is a keyed hash. Only the
responses that clients ask to keep contain text.
"""

from __future__ import annotations

from typing import Final

from pdmesh.core.kv.tier import Tier

_PREFIX: Final = "pdmesh:v1"

INSTANCES: Final = f"{_PREFIX}:instances"  # the set of the ids of instances that have keys
EPOCH: Final = f"{_PREFIX}:index:epoch"  # exists until the store is wiped
INSTANCE_KEYS: Final = f"{_PREFIX}:instance:"


def instance_blocks(instance_id: str, tier: Tier) -> str:
    """The set of the names (16 bytes each) of the blocks that the instance holds in the tier."""
    return f"{INSTANCE_KEYS}{instance_id}:{tier}-blocks"


def instance_version(instance_id: str) -> str:
    """A hash with incarnation and sequence. It is missing while the blocks are being rewritten."""
    return f"{INSTANCE_KEYS}{instance_id}:version"


# The hash tag {response} puts all keys of kept responses on one shard, because the script that
# makes room for a response may remove responses of any tenant.
KEPT_RESPONSES: Final = f"{_PREFIX}:{{response}}:"
# A sorted set of `<tenant>:<response id>`. The score is the expiry time in ms.
KEPT_EXPIRIES: Final = f"{_PREFIX}:{{response}}-expiries"
# A hash of sizes in bytes. A response has the field `<tenant>:<response id>`, and all responses of
# a tenant together have the field `<tenant>`. The empty field has the total.
KEPT_SIZES: Final = f"{_PREFIX}:{{response}}-sizes"


def kept_response(tenant: str, response_id: str) -> str:
    """The key of a response and its conversation, stored as JSON."""
    return f"{KEPT_RESPONSES}{tenant}:{response_id}"


def kept_mark(tenant: str, response_id: str, mark: str) -> str:
    """The key of a mark on a response.

    The mark `made` says that a living gateway is making the response. The mark `stop` orders that
    gateway to stop.
    """
    return f"{kept_response(tenant, response_id)}:{mark}"


def kept_expiries(tenant: str) -> str:
    """A sorted set of the tenant's response ids. The score is the expiry time in ms."""
    return f"{KEPT_EXPIRIES}:{tenant}"
