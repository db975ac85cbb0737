"""Every Redis key, in one place: pdmesh:v1:<noun>:<id>[:<field>].

No part of a prompt is in Redis: a block's name is a keyed hash.
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
