"""Every Redis key, in one place: pdmesh:v1:<noun>:<id>[:<field>].

No key holds anything of a prompt: a block's name is a keyed hash, written in hex.
"""

from __future__ import annotations

from typing import Final

from pdmesh.core.kv.tiers.load_plan import Tier

_PREFIX: Final = "pdmesh:v1"

INSTANCES: Final = f"{_PREFIX}:instances"  # set of the ids that own keys
EPOCH: Final = f"{_PREFIX}:index:epoch"  # exists until the store is wiped


def block(model_fingerprint: str, block_hash: bytes) -> str:
    """Set of the block's holders, see `holder`."""
    return f"{_PREFIX}:block:{model_fingerprint}:{block_hash.hex()}"


def holder(instance_id: str, tier: Tier) -> str:
    """A member of a block's set; the incarnation is in the instance's version."""
    return f"{instance_id}/{tier}"


def instance_of(holder: bytes, tier: Tier) -> str | None:
    """The instance in a member of a block's set; None if it holds the block in another tier."""
    instance_id, _, held_in = holder.decode().rpartition("/")
    return instance_id if held_in == tier else None


def instance_blocks(instance_id: str, tier: Tier) -> str:
    """Set of the blocks (16 bytes each) that the instance holds in the tier, to forget when
    it dies.
    """
    return f"{_PREFIX}:instance:{instance_id}:{tier}-blocks"


def instance_version(instance_id: str) -> str:
    """Hash: fingerprint, incarnation, sequence.

    Without the last two while the blocks are being rewritten.
    """
    return f"{_PREFIX}:instance:{instance_id}:version"
