"""The block index: kept true by deltas and snapshots, and mirrored in Redis."""
