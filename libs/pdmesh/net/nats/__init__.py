"""NATS: the bus for events, the registry, elections, and buckets for the mesh's lasting state."""
