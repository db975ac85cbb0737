"""Runs vLLM for the role pooling.

No KV leaves the engine, so it needs no connector and no tiers.
"""
