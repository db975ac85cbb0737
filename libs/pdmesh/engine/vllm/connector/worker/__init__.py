"""In each of vLLM's workers: the caches of one rank, and its KV on its way in and out."""
