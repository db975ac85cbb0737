"""The simulated engine: it needs no GPU and no weights.

The drawn tokens depend on every byte of KV. A formula gives the time of each step.
"""
