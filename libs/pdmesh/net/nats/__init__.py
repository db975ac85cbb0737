"""NATS: events, the registry, elections, and the buckets that hold what the mesh shall remember."""
