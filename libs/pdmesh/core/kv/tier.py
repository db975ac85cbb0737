"""The tiers of KV: where blocks of a prompt are kept, from fast to slow."""

from __future__ import annotations

from enum import StrEnum


class Tier(StrEnum):
    """Where KV is kept, from fast to slow (S76)."""

    ENGINE = "engine"  # the engine's own paged blocks
    HOST = "host"  # this instance's pool in host memory
    PEER = "peer"  # another instance's pool, over the KV transport
    FILE = "file"  # the shared file store
