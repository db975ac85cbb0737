"""An engine's model: digests of its files, its kinds of caches, and fixes that it needs in vLLM."""
