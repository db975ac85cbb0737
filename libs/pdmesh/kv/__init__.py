"""KV outside the engine: its transport between processes, its tiers, and an index of its blocks."""
