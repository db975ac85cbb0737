"""Runs in each vLLM worker: accesses one rank's caches, and moves its KV in and out."""
