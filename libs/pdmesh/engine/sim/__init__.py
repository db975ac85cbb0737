"""The simulated engine: it needs no GPU and no weights.

Its tokens depend on every byte of KV. A law gives the time of each step.
"""
