"""Tiers of KV below the engine's own blocks: host pool, peers' pools, shared file store (S76)."""
