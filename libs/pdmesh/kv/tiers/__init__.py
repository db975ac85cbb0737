"""Places for KV below the engine: the host pool, the peers' pools and a shared file store (S76)."""
