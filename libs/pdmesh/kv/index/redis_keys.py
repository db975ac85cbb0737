"""Every Redis key, in one place: pdmesh:v1:<noun>:<id>[:<field>].

The index keeps nothing of a prompt: a block's name is a keyed hash. Only responses that clients
ask to keep hold text.
"""

from __future__ import annotations

from typing import Final

from pdmesh.core.kv.tier import Tier

_PREFIX: Final = "pdmesh:v1"

INSTANCES: Final = f"{_PREFIX}:instances"  # set of the ids that own keys
EPOCH: Final = f"{_PREFIX}:index:epoch"  # exists until the store is wiped
INSTANCE_KEYS: Final = f"{_PREFIX}:instance:"


def instance_blocks(instance_id: str, tier: Tier) -> str:
    """Set of the blocks (16 bytes each) that the instance holds in the tier."""
    return f"{INSTANCE_KEYS}{instance_id}:{tier}-blocks"


def instance_version(instance_id: str) -> str:
    """A hash with incarnation and sequence. It is missing while the blocks are being rewritten."""
    return f"{INSTANCE_KEYS}{instance_id}:version"


# All keys of kept responses are on one shard: to make room for one, any tenant's may be removed.
KEPT_RESPONSES: Final = f"{_PREFIX}:{{response}}:"
# A sorted set of `<tenant>:<response id>` by when they expire, in ms.
KEPT_EXPIRIES: Final = f"{_PREFIX}:{{response}}-expiries"
# A hash: bytes of each response by `<tenant>:<response id>`, of each tenant, and of all under "".
KEPT_SIZES: Final = f"{_PREFIX}:{{response}}-sizes"


def kept_response(tenant: str, response_id: str) -> str:
    """A response and its conversation, as JSON."""
    return f"{KEPT_RESPONSES}{tenant}:{response_id}"


def kept_mark(tenant: str, response_id: str, mark: str) -> str:
    """`made`: a living gateway makes the response. `stop`: the gateway must stop making it."""
    return f"{kept_response(tenant, response_id)}:{mark}"


def kept_expiries(tenant: str) -> str:
    """Sorted set of the tenant's response ids by when they expire, in ms."""
    return f"{KEPT_EXPIRIES}:{tenant}"
