"""The tiers below the engine: what is loaded from which and when, which block leaves the pool, and
whether a disk may be used.
"""
