"""Every Redis key, in one place: pdmesh:v1:<noun>:<id>[:<field>].

No key holds anything of a prompt: a block's name is a keyed hash, written in hex.
"""

from __future__ import annotations

from typing import Final

_PREFIX: Final = "pdmesh:v1"

INSTANCES: Final = f"{_PREFIX}:instances"  # set of the ids that own keys
EPOCH: Final = f"{_PREFIX}:index:epoch"  # there as long as the store was not wiped


def block(model_fingerprint: str, block_hash: bytes) -> str:
    """Set of the instances that hold the block."""
    return f"{_PREFIX}:block:{model_fingerprint}:{block_hash.hex()}"


def instance_blocks(instance_id: str) -> str:
    """Set of the blocks (16 bytes each) that the instance holds: what to forget when it dies."""
    return f"{_PREFIX}:instance:{instance_id}:blocks"


def instance_version(instance_id: str) -> str:
    """Hash: fingerprint, incarnation, sequence. Without the last two while the blocks are being rewritten."""
    return f"{_PREFIX}:instance:{instance_id}:version"
