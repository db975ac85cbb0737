"""vLLM for the role pooling: no KV leaves it, so it needs no connector and no tiers."""
