"""Engines: the Protocol (base), vLLM, and the simulated engine."""
