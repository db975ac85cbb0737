"""Runs in vLLM's scheduler: plans each step's KV, orders requests and compiles constraints."""
