"""NATS: events, the registry, elections, and buckets for what the mesh must remember."""
