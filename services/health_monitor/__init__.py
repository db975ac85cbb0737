"""Who is alive: judges leases and heartbeats, and announces what changed."""
