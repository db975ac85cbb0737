"""The tiers below the engine: what is loaded from which, which block leaves the pool, and whether a
disk may be used.
"""
