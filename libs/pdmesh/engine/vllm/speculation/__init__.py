"""Speculation with vLLM: what it is told, and proposers of our own."""
