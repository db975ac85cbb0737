"""The index of which instance holds which KV blocks. Snapshots and deltas keep it up to date."""
