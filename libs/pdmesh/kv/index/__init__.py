"""The block index: kept up to date by deltas and snapshots, and mirrored in Redis."""
