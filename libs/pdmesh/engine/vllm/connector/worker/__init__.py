"""In each vLLM worker: the caches of one rank, and its KV on its way in and out."""
