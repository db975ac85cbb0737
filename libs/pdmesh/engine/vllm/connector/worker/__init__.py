"""In each of vLLM's workers: one rank's KV on its way in and out, and its caches."""
