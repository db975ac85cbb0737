"""Copies between the engine's paged blocks and contiguous bytes, on a processor and on a GPU."""
