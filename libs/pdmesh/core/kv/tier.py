"""The tiers of KV: where blocks of a prompt are kept, from fast to slow."""

from __future__ import annotations

from enum import StrEnum


class Tier(StrEnum):
    """A place where an instance can find KV (S76)."""

    ENGINE = "engine"  # the engine's own paged blocks
    HOST = "host"  # this instance's pool in host memory
    PEER = "peer"  # another instance's host pool, over the KV transport
    FILE = "file"  # the file store that instances share
