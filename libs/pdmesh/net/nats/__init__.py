"""NATS: events, the registry, elections, and the buckets of what the mesh must remember."""
