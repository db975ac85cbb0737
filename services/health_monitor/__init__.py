"""Which processes are alive: judges leases and heartbeats, and announces what changed."""
