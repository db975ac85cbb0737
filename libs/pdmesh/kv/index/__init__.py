"""The index of which instance holds which KV blocks. Deltas and snapshots keep it up to date."""
