"""Copies between the engine's paged KV blocks and contiguous bytes, on a CPU and on a GPU."""
